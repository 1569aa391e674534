"""Quantised checkpoints: which formats there are, which tensors each reads, and what it makes of them."""
