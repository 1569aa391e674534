"""Draws of tokens from logits, filters without a sort, penalties and log-probabilities."""
