"""The embedded demo model: a checkpoint in `model/`, made by `bench/demo_model/`."""
