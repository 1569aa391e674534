"""Quantised checkpoints: formats, the tensors that each format reads, and the weights that it makes from them."""
