"""Attention over keys and values; a mixture of experts instead of the MLP, in some layers or in all."""
