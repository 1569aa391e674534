"""What `/metrics` tells: our own families, and those under the names that vLLM gives them."""
