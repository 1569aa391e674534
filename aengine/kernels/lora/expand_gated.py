"""SiLU(gate) * up of y + B inner, gate and up side by side in y, for any mix of adapters: y is read once, not written.

A program owns some columns of gate and the same of up, and a tile of tokens of one adapter; or, of as many tokens in
their own order, those without an adapter.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for
from aengine.kernels.lora.base import AdapterWeights
from aengine.kernels.lora.order import TokenOrder
from aengine.kernels.variants import keep_variants

BLOCK_N, WARPS = 128, 8
MOST_RANK = 64  # whose factors a program holds at once


@keep_variants
@triton.jit(do_not_specialize=["tokens", "capacity"])
def _expand_gated_kernel(
    y_ptr,  # [tokens, 2 * N]
    inner_ptr,  # [tokens, 2 * RANK] float32
    b_ptr,  # [places, 2 * N, RANK]
    out_ptr,  # [tokens, N]
    places_ptr,  # [tokens]
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    tokens,
    capacity,
    N: tl.constexpr,
    RANK: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = N // BLOCK_N
    n = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(0) // BLOCKS
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.zeros([], tl.int64)
    if tile < capacity:
        known = tile < tl.load(count_ptr)
        place = tl.load(tiles_ptr + tile, mask=known, other=0).to(tl.int64)
        at = tl.load(tiles_ptr + capacity + tile, mask=known, other=0) + tl.arange(0, HEIGHT)
        used = at < tl.load(tiles_ptr + 2 * capacity + tile, mask=known, other=0)
        token = tl.load(order_ptr + at, mask=used, other=0)
    else:
        token = (tile - capacity) * HEIGHT + tl.arange(0, HEIGHT)
        used = token < tokens
        used = used & (tl.load(places_ptr + token, mask=used, other=1) == 0)
    if tl.max(used.to(tl.int32), axis=0) > 0:
        inside = used[:, None]
        row = token.to(tl.int64)[:, None]
        y_at = y_ptr + row * (2 * N) + n[None, :]
        gate = tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(y_at + N, mask=inside, other=0.0).to(tl.float32)
        if place > 0:
            r = tl.arange(0, RANK)[None, :]
            b_rows = b_ptr + place * (2 * N * RANK) + n[:, None] * RANK + r
            b_gate, b_up = tl.load(b_rows), tl.load(b_rows + N * RANK)
            inner = inner_ptr + row * (2 * RANK) + r
            of_gate, of_up = tl.load(inner, mask=inside, other=0.0), tl.load(inner + RANK, mask=inside, other=0.0)
            gate = tl.dot(of_gate.to(b_gate.dtype), tl.trans(b_gate), gate)
            up = tl.dot(of_up.to(b_up.dtype), tl.trans(b_up), up)
        dtype = out_ptr.dtype.element_ty
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)  # as a product gives them
        activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        tl.store(out_ptr + row * N + n[None, :], (activated * up).to(dtype), mask=inside)


def expands_gated(weights: AdapterWeights) -> bool:
    """Whether there is a kernel for these: gate and up alone, of 16-bit floats."""
    gate, rank = weights.outputs[0], weights.rank
    return (
        weights.outputs == (gate, gate)
        and gate % BLOCK_N == 0
        and rank in (16, 32, MOST_RANK)
        and weights.b.element_size() == 2
    )


def expand_gated(inner: Tensor, weights: AdapterWeights, y: Tensor, order: TokenOrder) -> Tensor:
    """inner as of `shrink`, y [tokens, 2 * n], gate first, both contiguous -> [tokens, n]."""
    (tokens, double), n, height = y.shape, y.shape[1] // 2, order.height
    out = y.new_empty(tokens, double // 2)
    overlap = launch_for(y.device).overlap
    tiles = order.capacity + -(-tokens // height)
    _expand_gated_kernel[(tiles * (n // BLOCK_N),)](
        y, inner, weights.b, out, order.places, order.order, order.tiles, order.count, tokens, order.capacity,
        N=n, RANK=weights.rank, HEIGHT=height, BLOCK_N=BLOCK_N, OVERLAP=overlap, num_warps=WARPS, launch_pdl=overlap,
    )  # fmt: skip
    return out
