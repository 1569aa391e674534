"""Experts whose matrices stay in 4-bit codes."""
