"""A step on one rank: its rows, the tensors made from its plan, the forward pass and its results."""
