"""The specification of a decoder as data: its layers, and what it computes before and after them."""
