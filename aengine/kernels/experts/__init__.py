"""Mixtures of experts: the choice of each token's experts, and the weighted sum of their results."""
