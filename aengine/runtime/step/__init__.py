"""A step on one rank: its rows, the tensors made of its plan, the forward pass, and what is taken of it."""
