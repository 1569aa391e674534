"""Attention over latents, from which each head makes keys and values of its own."""
