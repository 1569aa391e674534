"""Models: configuration, weights, and the decoder that runs every family."""
