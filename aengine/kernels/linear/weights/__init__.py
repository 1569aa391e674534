"""Quantised weight matrices, between the formats of checkpoints and the layouts of kernels; one class a file."""
