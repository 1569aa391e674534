"""Checkpoints: configuration, weights, and the one decoder that runs them."""
