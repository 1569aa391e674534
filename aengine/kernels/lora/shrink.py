"""inner = A x of each token's own adapter, for any mix of adapters.

A program owns a tile of tokens of one adapter, some rows of A and one of SPLITS pieces of its columns, the first of
which are on their way before it waits for the kernel that makes its input. The last program to arrive at a tile adds
the pieces up in order.
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
from aengine.kernels.parts import Parts
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _shrink_kernel(
    x_ptr,  # [tokens, K]
    a_ptr,  # [places, R, K]
    inner_ptr,  # [tokens, R] float32
    part_ptr,  # [capacity * blocks of rows, SPLITS, BLOCK_R, HEIGHT] float32
    arrived_ptr,  # [capacity * blocks of rows] int32, zero between launches
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
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
        inside = early_k < left
        a_early = tl.load(a_rows + early_k, mask=inside, other=0.0)
        if OVERLAP:
            gdc_wait()
        x_early = tl.load(x_rows + early_k, mask=used[:, None] & inside, other=0.0)
        acc = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
        for step in tl.range(EARLY, PIECE, BLOCK_K, num_stages=STAGES):
            within = step + k < left
            a = tl.load(a_rows + step + k, mask=within, other=0.0)
            x = tl.load(x_rows + step + k, mask=used[:, None] & within, other=0.0)
            acc = tl.dot(a, tl.trans(x), acc, input_precision=PRECISION)
        x_early = not_before(x_early, OVERLAP)
        acc = tl.dot(a_early, tl.trans(x_early), acc, input_precision=PRECISION)
        out = inner_ptr + token.to(tl.int64)[None, :] * R + r[:, None]
        stored = used[None, :] & (r < R)[:, None]
        if SPLITS == 1:
            tl.store(out, acc, mask=stored)
        else:
            SIZE: tl.constexpr = BLOCK_R * HEIGHT
            whose = tile * BLOCKS + block
            parts = part_ptr + whose.to(tl.int64) * (SPLITS * SIZE)
            parts += tl.arange(0, BLOCK_R)[:, None] * HEIGHT + tl.arange(0, HEIGHT)[None, :]
            tl.store(parts + split * SIZE, acc)
            tl.debug_barrier()  # every thread's part is stored before one of them announces it
            if tl.atomic_add(arrived_ptr + whose, 1, sem="acq_rel") == SPLITS - 1:
                tl.debug_barrier()
                tl.store(arrived_ptr + whose, 0)
                total = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
                for other in tl.static_range(SPLITS):
                    # Other processors wrote these: read past the first-level cache.
                    total += tl.load(parts + other * SIZE, cache_modifier=".cg")
                tl.store(out, total, mask=stored)


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How one shape is cut up. early: columns loaded before the wait, a power of two."""

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


def shrink(x: Tensor, a: Tensor, order: TokenOrder, config: ShrinkConfig, scratch: Parts) -> Tensor:
    """x [tokens, k], a [places, r, k], both contiguous -> float32 [tokens, r], undefined without an adapter."""
    _, r, k = a.shape
    launch = launch_for(x.device)
    inner = x.new_empty(len(x), r, dtype=torch.float32)
    shared = order.capacity * -(-r // config.block_r)
    sums = shared * config.splits * config.block_r * order.height
    parts, arrived = scratch(x.device, sums, shared) if config.splits > 1 else (x, x)
    _shrink_kernel[(shared * config.splits,)](
        x, a, inner, parts, arrived, order.order, order.tiles, order.count, order.capacity,
        R=r, K=k, HEIGHT=order.height, BLOCK_R=config.block_r, BLOCK_K=config.block_k, SPLITS=config.splits,
        STAGES=config.stages, EARLY=config.early, PRECISION="ieee" if x.element_size() > 2 else "tf32",
        OVERLAP=launch.overlap, num_warps=config.warps, launch_pdl=launch.overlap,
    )  # fmt: skip
    return inner
