"""Blocks that only some families have: other attention, other feed-forward parts, inputs of each layer."""
