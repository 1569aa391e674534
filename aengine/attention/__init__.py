"""Attention over the paged KV cache: one protocol and its backends."""
