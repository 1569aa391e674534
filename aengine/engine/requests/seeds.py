"""Derives the seeds of the n choices of one request."""

from __future__ import annotations


def sibling_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n choices: the request's own for the first, far apart for the others."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF  # splitmix64's increment and finalizer
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1
