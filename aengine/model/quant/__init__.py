"""Quantised checkpoints: the formats, the tensors that each reads, and the weights that it makes of them."""
