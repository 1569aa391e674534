"""From logits to token ids: the batched sampler and its stages."""

from aengine.sampling.draw import DrawLogprobs
from aengine.sampling.sampler import Draws, Kind, Sampler

__all__ = ["DrawLogprobs", "Draws", "Kind", "Sampler"]
