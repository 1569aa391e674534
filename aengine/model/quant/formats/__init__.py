"""The formats that quantised checkpoints come in, one file each: their tensors, and what config.json says of them."""
