"""One file for each quantised format: its settings in config.json, its tensors, and how they are unpacked."""
