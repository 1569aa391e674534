"""Delta nets on a CUDA device."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.delta.base import DeltaState, DeltaWeights, StateBatch
from aengine.kernels.delta.decode import DecodeConfig, delta_decode


class TritonDelta:
    """Decodes take one kernel."""

    def __init__(self, weights: DeltaWeights) -> None:
        self._weights = weights

    def __call__(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: DeltaState, batch: StateBatch) -> Tensor:
        out = qkv.new_empty(len(qkv), self._weights.heads.values)
        delta_decode(out, qkv, z, b, a, state, self._weights, batch, DecodeConfig(8))
        return out
