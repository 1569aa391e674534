"""Adapters as files hold them, checked against the model, and the memory that a model keeps for them."""
