"""inner = A x of each token's own adapter, for any mix of adapters.

A program owns a tile of tokens of one adapter, some rows of A and one of SPLITS pieces of its columns, the first of
which are on their way before it waits for the kernel that makes x. Whoever reads the results adds up the pieces.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.small_linear import not_before
from aengine.kernels.lora.order import TokenOrder
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["tokens", "capacity"])
def _shrink_kernel(
    x_ptr,  # [tokens, K]
    a_ptr,  # [places, R, K]
    inner_ptr,  # [SPLITS, tokens, R] float32
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    tokens,
    capacity,
    R: tl.constexpr,
    K: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # columns of the piece that are loaded before the wait
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    PIECE: tl.constexpr = ((K + 15) // 16 + SPLITS - 1) // SPLITS * 16
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS % BLOCKS
    tile = tl.program_id(0) // (SPLITS * BLOCKS)
    if OVERLAP:
        gdc_launch_dependents()
    known = tile < tl.load(count_ptr)
    if known | (tile == 0):  # of every launch some program has to wait
        place = tl.load(tiles_ptr + tile, mask=known, other=0)
        start = tl.load(tiles_ptr + capacity + tile, mask=known, other=0)
        end = tl.load(tiles_ptr + 2 * capacity + tile, mask=known, other=0)
        at = start + tl.arange(0, HEIGHT)
        used = at < end
        token = tl.load(order_ptr + at, mask=used, other=0)
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        left = tl.minimum(PIECE, K - split * PIECE)  # columns of this piece
        a_rows = (a_ptr + place.to(tl.int64) * (R * K) + tl.minimum(r, R - 1) * K + split * PIECE)[:, None]
        x_rows = (x_ptr + token.to(tl.int64) * K + split * PIECE)[:, None]
        early_k = tl.arange(0, EARLY)[None, :]
        k = tl.arange(0, BLOCK_K)[None, :]
        a_early = tl.load(a_rows + early_k, mask=early_k < left, other=0.0)
        if OVERLAP:
            gdc_wait()
        x_early = tl.load(x_rows + early_k, mask=used[:, None] & (early_k < left), other=0.0)
        acc = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
        for step in tl.range(EARLY, PIECE, BLOCK_K, num_stages=STAGES):
            a = tl.load(a_rows + step + k, mask=step + k < left, other=0.0)
            x = tl.load(x_rows + step + k, mask=used[:, None] & (step + k < left), other=0.0)
            acc = tl.dot(a, tl.trans(x), acc, input_precision=PRECISION)
        acc = tl.dot(a_early, tl.trans(not_before(x_early, OVERLAP)), acc, input_precision=PRECISION)
        out = inner_ptr + (split * tokens + token).to(tl.int64)[None, :] * R + r[:, None]
        tl.store(out, acc, mask=used[None, :] & (r < R)[:, None])


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How one shape is cut up. early: columns loaded before the wait, at most k / splits."""

    block_r: int
    block_k: int
    splits: int
    stages: int
    warps: int
    early: int

    def shared_memory(self, height: int, element_size: int) -> int:
        """Bytes at most: copies on their way, with those that are being multiplied, and what came early."""
        columns = (self.stages + 1) * self.block_k + self.early
        return columns * (self.block_r + height) * element_size + 4 * self.block_r * height


def shrink(x: Tensor, a: Tensor, order: TokenOrder, config: ShrinkConfig) -> Tensor:
    """x [tokens, k], a [places, r, k], both contiguous -> float32 [splits, tokens, r].

    The sum over the splits is A x; rows of tokens without an adapter are undefined.
    """
    (tokens, k), (_, r, _) = x.shape, a.shape
    overlap = launch_for(x.device).overlap
    inner = x.new_empty(config.splits, tokens, r, dtype=torch.float32)
    blocks = -(-r // config.block_r)
    _shrink_kernel[(order.capacity * blocks * config.splits,)](
        x, a, inner, order.order, order.tiles, order.count, tokens, order.capacity,
        R=r, K=k, HEIGHT=order.height, BLOCK_R=config.block_r, BLOCK_K=config.block_k, SPLITS=config.splits,
        STAGES=config.stages, EARLY=config.early, PRECISION="ieee" if x.element_size() > 2 else "tf32",
        OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip
    return inner
