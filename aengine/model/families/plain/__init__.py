"""Attention over keys and values and an MLP in every layer, nearly the same in all of them."""
