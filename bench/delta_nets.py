"""Times a delta net of Qwen3.5-9B without its projections: decodes against their bytes, chunks by kernel.

python -m bench.delta_nets
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import torch

from aengine.kernels.delta.across import run_across
from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.delta.convolve import convolve
from aengine.kernels.delta.triton_delta import TritonDelta, across_config, convolve_config
from aengine.kernels.delta.within import solve_within
from aengine.kernels.launch import launch_for
from aengine.kernels.recurrent.blocks import Blocks
from aengine.kernels.recurrent.state import RecurrentHeads, RecurrentState, StateBatch
from bench.kernel_timing import DEVICE, graph_time, random_half

COPY_TB_S = 4.24  # of an H200, measured: states are read and written
HEADS = RecurrentHeads(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
WIDTH = 4
COLUMNS = (HEADS.channels, HEADS.values, HEADS.value_heads, HEADS.value_heads)


def weights() -> DeltaWeights:
    conv, norm = random_half(HEADS.channels, WIDTH), random_half(HEADS.value_dim)
    return DeltaWeights(HEADS, conv, random_half(HEADS.value_heads), random_half(HEADS.value_heads), norm, 1e-6)


def state(slots: int, kept: torch.dtype) -> RecurrentState:
    conv = torch.zeros(slots, WIDTH, HEADS.channels, dtype=torch.bfloat16, device=DEVICE)
    matrices = (HEADS.value_heads, HEADS.key_dim, HEADS.value_dim)
    return RecurrentState(conv, torch.zeros(slots, *matrices, dtype=kept, device=DEVICE))


def step(slots: Sequence[int], chunks: Sequence[int]) -> StateBatch:
    """Run decodes in `slots`, or chunks of the given number of tokens."""

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    positions = [i for tokens in chunks for i in range(tokens)] if chunks else [100] * len(slots)
    starts = [0, *itertools.accumulate(chunks)] if chunks else [len(slots)]
    saves, where = ints([0] * len(positions)), ints(slots)
    return StateBatch(where, where, ints(starts), ints(positions).long(), saves, 0 if chunks else len(slots))


def decodes(rows: int, kept: torch.dtype) -> dict[str, object]:
    """Of states that rotate through more memory than a cache holds."""
    calls = max(4, 96 // rows)
    net, pool = TritonDelta(weights()), state(rows * calls + 1, kept)
    x = random_half(rows, sum(COLUMNS)).split(COLUMNS, dim=1)
    batches = [step(range(1 + i * rows, 1 + (i + 1) * rows), ()) for i in range(calls)]
    us = graph_time([lambda batch=batch: net(*x, pool, batch) for batch in batches])  # type: ignore[misc]
    states = 2 * pool.recurrence[0].nbytes + (WIDTH + 1) * HEADS.channels * 2
    limit = rows * (states + 2 * sum(COLUMNS) + 2 * HEADS.values) / COPY_TB_S / 1e6
    return {
        "rows": rows,
        "state": str(kept),
        "us": round(us, 2),
        "limit": round(limit, 2),
        "of it": round(limit / us, 3),
    }


def chunks(lens: Sequence[int]) -> dict[str, object]:
    own, pool, batch = weights(), state(len(lens) + 1, torch.float32), step(range(1, len(lens) + 1), lens)
    qkv, z, b, a = random_half(sum(lens), sum(COLUMNS)).split(COLUMNS, dim=1)
    net, blocks, out = TritonDelta(own), Blocks.from_batch(batch), random_half(sum(lens), HEADS.values)
    launch = launch_for(DEVICE)
    turns = convolve_config(HEADS, blocks.most, launch)
    parts = convolve(qkv, pool, own, batch, blocks, turns)
    within = solve_within(qkv, parts, b, a, pool, own, batch, blocks)
    config = across_config(HEADS, 2, launch)
    us = {
        "convolution": graph_time([lambda: convolve(qkv, pool, own, batch, blocks, turns)] * 4),
        "within": graph_time([lambda: solve_within(qkv, parts, b, a, pool, own, batch, blocks)] * 4),
        "across": graph_time([lambda: run_across(out, parts, z, within, pool, own, batch, blocks, config)] * 4),
        "all": graph_time([lambda: net(qkv, z, b, a, pool, batch)] * 4),
    }
    return {"chunks": f"{len(lens)} x {lens[0]}", **{name: round(value, 1) for name, value in us.items()}}


def main() -> None:
    for kept, rows in itertools.product((torch.float32, torch.bfloat16), (1, 4, 16, 64, 256)):
        print(json.dumps(decodes(rows, kept)), flush=True)
    for lens in ([4096] * 4, [4096] * 2, [8192], [512] * 16, [512], [64] * 8):
        print(json.dumps(chunks(lens)), flush=True)


if __name__ == "__main__":
    main()
