"""The running batch on the device: its state, how steps are launched and awaited, and how much memory it gets."""
