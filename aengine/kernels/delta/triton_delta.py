"""Delta nets on a CUDA device, and how their kernels divide their work."""

from __future__ import annotations

import math
from functools import lru_cache

from torch import Tensor

from aengine.kernels.delta.across import AcrossConfig, run_across
from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.delta.convolve import ConvolveConfig, convolve
from aengine.kernels.delta.decode import DeltaDecodeConfig, delta_decode
from aengine.kernels.delta.drafts import decode_drafts
from aengine.kernels.delta.within import solve_within
from aengine.kernels.launch import Launch, launch_for, power_of_two
from aengine.kernels.recurrent.blocks import Blocks
from aengine.kernels.recurrent.state import BLOCK, RecurrentHeads, RecurrentState, StateBatch, decode_warps


@lru_cache
def delta_decode_config(heads: RecurrentHeads, state_size: int) -> DeltaDecodeConfig:
    """Return the config of a decode. state_size: bytes of an element of the state."""
    return DeltaDecodeConfig(decode_warps(heads), through_memory=state_size == 2)


@lru_cache
def convolve_config(heads: RecurrentHeads, blocks: int, launch: Launch) -> ConvolveConfig:
    """Return the config of a convolution. blocks: number of blocks of all chunks.

    A program computes some heads token by token, with 8 channels a thread. With few blocks it computes a quarter of a
    block.
    """
    each = math.gcd(heads.key_heads, heads.value_heads, 8)
    programs = blocks * (2 * heads.key_heads + heads.value_heads) // each
    tokens = BLOCK if programs >= 8 * launch.processors else BLOCK // 4
    return ConvolveConfig(each, tokens, max(1, each * power_of_two(max(heads.key_dim, heads.value_dim)) // 256))


@lru_cache
def across_config(heads: RecurrentHeads, element_size: int, launch: Launch) -> AcrossConfig:
    """Return the config of `run_across`. With less shared memory the pipeline has fewer stages."""
    block_v = min(64, max(16, power_of_two(heads.value_dim)))
    keys = power_of_two(heads.key_dim)
    block = BLOCK * (2 * keys + block_v + 2 * BLOCK) * element_size
    own = (keys + BLOCK) * block_v * element_size
    stages = max((n for n in (1, 2, 3) if n * block + own <= launch.shared_memory), default=1)
    return AcrossConfig(block_v, 4, stages)


class TritonDelta:
    """A `DeltaNet` in Triton. Decodes need one kernel, with or without drafts. Chunks need three or four.

    The states that a step starts from must be written before the last ordinary launch that precedes the layers.
    """

    def __init__(self, weights: DeltaWeights) -> None:
        self._weights = weights

    def __call__(
        self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: RecurrentState, batch: StateBatch
    ) -> Tensor:
        weights, drafted = self._weights, batch.drafted
        out = qkv.new_empty(len(qkv), weights.heads.values)
        config = delta_decode_config(weights.heads, state.recurrence.element_size())
        if batch.num_decodes and drafted is None:
            delta_decode(out, qkv, z, b, a, state, weights, batch, config)
        if batch.num_chunks and len(qkv) and (drafted is None or drafted.has_prompts):
            self._prefill(out, qkv, z, b, a, state, batch if drafted is None else batch.plan(StateBatch, batch.prompts))
        if drafted is not None:
            if state.drafts is None:
                raise ValueError("the states have no memory for drafts")
            # After the chunks' kernels, which write zeros for the tokens of rows with drafts.
            decode_drafts(out, qkv, z, b, a, state, state.drafts, weights, batch, drafted, config.warps)
        return out

    def _prefill(
        self, out: Tensor, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: RecurrentState, batch: StateBatch
    ) -> None:
        """Write the chunks' results to `out`, and update their states."""
        weights = self._weights
        blocks = batch.plan(Blocks, lambda: Blocks.from_batch(batch))
        launch = launch_for(qkv.device)
        turns = convolve_config(weights.heads, blocks.most, launch)
        parts = convolve(qkv, state, weights, batch, blocks, turns)
        within = solve_within(qkv, parts, b, a, state, weights, batch, blocks)
        config = across_config(weights.heads, qkv.element_size(), launch)
        run_across(out, parts, z, within, state, weights, batch, blocks, config)
