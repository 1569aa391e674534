"""Mamba2 on a CUDA device. The convolution runs as torch's kernels, the recurrence as one kernel of ours or two."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.mamba.base import MambaWeights
from aengine.kernels.mamba.chunks import chunks_config, run_chunks
from aengine.kernels.mamba.decode import decode
from aengine.kernels.recurrent.short_conv import ShortConv
from aengine.kernels.recurrent.state import RecurrentState, StateBatch


class TritonMamba:
    """A `Mamba` in Triton. It needs no host sync, so it can be captured into a CUDA graph."""

    def __init__(self, weights: MambaWeights) -> None:
        self._weights = weights
        self._conv = ShortConv(weights.conv, weights.conv_bias)

    def __call__(self, xbc: Tensor, z: Tensor, dt: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        weights, drafted = self._weights, batch.drafted
        out = xbc.new_empty(len(xbc), weights.heads.values)
        filtered = F.silu(self._conv(xbc, state, batch), inplace=True)
        if batch.num_chunks and len(xbc) and (drafted is None or drafted.has_prompts):
            config = chunks_config(weights.heads, xbc.element_size(), launch_for(xbc.device))
            prompts = batch if drafted is None else batch.plan(StateBatch, batch.prompts)
            run_chunks(out, filtered, z, dt, state, weights, prompts, config)
        if batch.num_decodes or drafted is not None:
            # After the chunks' kernel, which writes zeros for the tokens of rows with drafts.
            decode(out, filtered, z, dt, state, weights, batch)
        return out
