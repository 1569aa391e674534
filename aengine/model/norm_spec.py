"""The specification of norms as data."""

from __future__ import annotations

import msgspec


class NormSpec(msgspec.Struct, frozen=True):
    """An RMS norm over the hidden size, or a LayerNorm if it is centred."""

    name: str  # in checkpoints, within the layer or the model
    eps: float
    offset: float = 0.0  # is added to the weight
    centred: bool = False  # whether the mean is subtracted first. Then there is no offset.
    bias: bool = False  # only if it is centred

    def parameters(self, hidden: int) -> int:
        return (1 + self.bias) * hidden


class LayerNorms(msgspec.Struct, frozen=True):
    """The norms before and after attention, and before and after the feed-forward part. None: there is no such norm."""

    before_attention: NormSpec | None
    after_attention: NormSpec | None
    before_ffn: NormSpec | None
    after_ffn: NormSpec | None

    def parameters(self, hidden: int) -> int:
        norms = (self.before_attention, self.after_attention, self.before_ffn, self.after_ffn)
        return sum(norm.parameters(hidden) for norm in norms if norm is not None)
