"""Experts whose matrices stay in 4-bit codes, unpacked in the loaders of their tiles."""
