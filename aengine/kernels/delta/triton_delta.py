"""Delta nets on a CUDA device."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.delta.across import carry_across
from aengine.kernels.delta.base import DeltaState, DeltaWeights, StateBatch
from aengine.kernels.delta.blocks import Blocks
from aengine.kernels.delta.config import across_config, convolve_config, decode_config
from aengine.kernels.delta.convolve import convolve
from aengine.kernels.delta.decode import delta_decode
from aengine.kernels.delta.within import solve_within
from aengine.kernels.launch import launch_for


class TritonDelta:
    """Decodes take one kernel, chunks three or four.

    States and rings that a step begins with were written before the last ordinary launch that precedes the layers.
    """

    def __init__(self, weights: DeltaWeights) -> None:
        self._weights = weights

    def __call__(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: DeltaState, batch: StateBatch) -> Tensor:
        weights = self._weights
        out = qkv.new_empty(len(qkv), weights.heads.values)
        if batch.num_decodes:
            delta_decode(
                out, qkv, z, b, a, state, weights, batch, decode_config(weights.heads, state.recurrence.element_size())
            )
        if batch.num_chunks and len(qkv):
            blocks = batch.plan(Blocks, lambda: Blocks.of(batch))
            launch = launch_for(qkv.device)
            turns = convolve_config(weights.heads, weights.conv.shape[1], blocks.most, launch)
            parts = convolve(qkv, state, weights, batch, blocks, turns)
            within = solve_within(qkv, parts, b, a, state, weights, batch, blocks)
            config = across_config(weights.heads, qkv.element_size(), launch)
            carry_across(out, parts, z, within, state, weights, batch, blocks, config)
        return out
