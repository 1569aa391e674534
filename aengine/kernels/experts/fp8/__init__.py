"""Experts whose matrices stay in 8-bit floats."""
