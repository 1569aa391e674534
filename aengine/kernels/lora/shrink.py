"""Computes inner = A x for any mix of adapters.

`shrink` serves many rows, before a product that cannot add B inner. `shrink_few` serves 2 to 64 rows and `shrink_row`
one row, before a product that adds B inner.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.small_linear import not_before
from aengine.kernels.lora.order import TokenOrder
from aengine.kernels.parts import Parts, is_last
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
    if known | (tile == 0):  # in every launch at least one program must wait
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
            if is_last(arrived_ptr + whose, SPLITS):
                total = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
                for other in tl.static_range(SPLITS):
                    # Other processors wrote these: read past the first-level cache.
                    total += tl.load(parts + other * SIZE, cache_modifier=".cg")
                tl.store(out, total, mask=stored)


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How the kernel divides one shape. early: columns that are loaded before the wait; a power of two."""

    block_r: int
    block_k: int
    splits: int
    stages: int
    warps: int
    early: int

    def shared_memory(self, height: int, element_size: int) -> int:
        """Return an upper bound of its bytes: the stages, the block being multiplied, and the early columns."""
        columns = (self.stages + 1) * self.block_k + self.early
        return columns * (self.block_r + height) * element_size + 4 * self.block_r * height


def shrink(x: Tensor, a: Tensor, order: TokenOrder, config: ShrinkConfig, scratch: Parts) -> Tensor:
    """Return A x, float32 [tokens, r], undefined for tokens without an adapter.

    x [tokens, k] and a [places, r, k] are contiguous. A program computes a tile of tokens of one adapter with some rows
    of A and one piece of its columns. The last program of a tile to finish adds the pieces up in order.
    """
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


@keep_variants
@triton.jit(do_not_specialize=["tokens", "capacity", "programs"])
def _shrink_few_kernel(
    x_ptr,  # [tokens, K]
    a_ptr,  # [places, R, K]
    inner_ptr,  # [tokens, R // RANK, capacity, RANK]
    part_ptr,  # [capacity * blocks of rows, PIECES, BLOCK_R, HEIGHT] float32
    arrived_ptr,  # [capacity * blocks of rows] int32, zero between launches
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    own_ptr,  # [tokens]
    tokens,
    capacity,
    programs,
    R: tl.constexpr,
    RANK: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,  # tokens, padded
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,  # at most
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SIZE: tl.constexpr = BLOCK_R * HEIGHT
    program = tl.program_id(0)
    shared = tl.load(count_ptr) * BLOCKS
    pieces = 1
    while (2 * pieces <= PIECES) & (2 * pieces * shared <= programs):
        pieces *= 2
    piece = (STEPS + pieces - 1) // pieces * BLOCK_K  # columns
    k = tl.arange(0, BLOCK_K)[None, :]
    if OVERLAP:  # noqa: SIM102 (a constant: without it nothing of this is compiled)
        if (program == 0) | (program < shared * pieces):  # others end, so the product can use their processors
            gdc_wait()
            gdc_launch_dependents()  # the next kernel may then read the data that this one waited for
    for item in tl.range(program, shared * pieces, programs, num_stages=1):
        whose = item // pieces
        tile = whose // BLOCKS
        place = tl.load(tiles_ptr + tile).to(tl.int64)
        end = tl.load(tiles_ptr + 2 * capacity + tile)
        at = tl.load(tiles_ptr + capacity + tile) + tl.arange(0, HEIGHT)
        token = tl.load(order_ptr + at, mask=at < end, other=0)
        used = (at < end)[:, None]
        r = whose % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
        a_rows = (a_ptr + place * (R * K) + r * K)[:, None]
        x_rows = (x_ptr + token * K)[:, None]
        acc = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
        begin = item % pieces * piece
        for step in tl.range(begin, tl.minimum(begin + piece, K), BLOCK_K, num_stages=STAGES):
            inside = step + k < K
            a = tl.load(a_rows + step + k, mask=inside & (r < R)[:, None], other=0.0)
            x = tl.load(x_rows + step + k, mask=inside & used, other=0.0)
            acc = tl.dot(a, tl.trans(x), acc, input_precision=PRECISION)
        parts = part_ptr + whose * (PIECES * SIZE) + tl.arange(0, BLOCK_R)[:, None] * HEIGHT + tl.arange(0, HEIGHT)
        tl.store(parts + item % pieces * SIZE, acc)
        if is_last(arrived_ptr + whose, pieces):
            total = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
            for other in tl.range(0, pieces, num_stages=1):
                # Other processors wrote these: read past the first-level cache.
                total += tl.load(parts + other * SIZE, cache_modifier=".cg")
            # The tile's columns belong to its own tokens; they are zero for all others.
            stride = capacity * R
            column = r // RANK * (capacity * RANK) + tile * RANK + r % RANK
            m = tl.arange(0, M)
            others = (m < tokens) & (tl.load(own_ptr + m, mask=m < tokens, other=0) != tile)
            zeros = tl.zeros([M, BLOCK_R], inner_ptr.dtype.element_ty)
            zeros_at = inner_ptr + (m * stride)[:, None] + column[None, :]
            tl.store(zeros_at, zeros, mask=others[:, None] & (r < R)[None, :])
            out = inner_ptr + (token * stride)[None, :] + column[:, None]
            tl.store(out, total.to(inner_ptr.dtype.element_ty), mask=tl.trans(used) & (r < R)[:, None])


@dataclass(frozen=True, slots=True)
class ShrinkFewConfig:
    """How the kernel divides one shape. pieces: the most pieces of the columns. programs: per processor."""

    block_r: int
    block_k: int
    pieces: int
    stages: int
    warps: int
    programs: int


def shrink_few(x: Tensor, a: Tensor, rank: int, order: TokenOrder, config: ShrinkFewConfig, scratch: Parts) -> Tensor:
    """Return A x as further columns of x for the product that follows: [tokens, parts, tiles, rank] in a's dtype.

    A tile's columns hold A x for the tile's own tokens and zeros for all others; columns of unused tiles are undefined.
    x [tokens, k] and a [places, parts * rank, k] are contiguous.

    A program computes a tile of tokens of one adapter with some rows of A and one piece of its columns. With fewer
    adapters there are more pieces, so that all programs have work. At the same time the product loads its weight. The
    last program of a tile to finish adds the pieces up in order.
    """
    (tokens, _), (_, r, k) = x.shape, a.shape
    launch = launch_for(x.device)
    inner = a.new_empty(tokens, r // rank, order.capacity, rank)
    shared = order.capacity * -(-r // config.block_r)
    programs = min(config.programs * launch.processors, shared * config.pieces)
    sums = shared * config.pieces * config.block_r * order.height
    _shrink_few_kernel[(programs,)](
        x, a, inner, *scratch(x.device, sums, shared), order.order, order.tiles, order.count, order.own, tokens,
        order.capacity, programs,
        R=r, RANK=rank, K=k, M=max(16, power_of_two(tokens)), HEIGHT=order.height, BLOCK_R=config.block_r,
        BLOCK_K=config.block_k, PIECES=config.pieces, STAGES=config.stages,
        PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap, num_warps=config.warps,
        launch_pdl=launch.overlap,
    )  # fmt: skip
    return inner


@keep_variants
@triton.jit
def _shrink_row_kernel(
    x_ptr,  # [K], or [2 * K] with SILU
    a_ptr,  # [places, R, K]
    norm_ptr,  # [K], NORM only
    inner_ptr,  # [SPLITS, R] float32
    activated_ptr,  # [K], SILU only
    place_ptr,  # [1]
    R: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < K
    if OVERLAP:
        gdc_launch_dependents()
    place = tl.load(place_ptr).to(tl.int64)
    a_rows = a_ptr + place * (R * K) + tl.minimum(r, R - 1)[:, None] * K
    a = tl.load(a_rows + k[None, :], mask=inside[None, :], other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    x = tl.load(x_ptr + k, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if SILU:
        up = tl.load(x_ptr + K + k, mask=inside, other=0.0).to(tl.float32)
        wide = (wide * tl.sigmoid(wide)).to(x.dtype).to(tl.float32)
        activated = (wide * up).to(x.dtype)
        if block == 0:
            tl.store(activated_ptr + k, activated, mask=inside)
        wide = activated.to(tl.float32)
    if NORM:
        wide *= norm
    inner = tl.sum(a.to(tl.float32) * wide[None, :], axis=1)
    tl.store(inner_ptr + split * R + r, inner, mask=r < R)


@dataclass(frozen=True, slots=True)
class ShrinkRowConfig:
    """How the kernel divides one shape."""

    block_r: int
    block_k: int
    warps: int


def shrink_row(
    x: Tensor, a: Tensor, place: Tensor, config: ShrinkRowConfig, norm: Norm | None = None, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """Return parts of A x of one row, float32 [splits, r], and the input of the product [1, k].

    The product adds up the splits. silu: x holds gate and up; the product's input is SiLU(gate) * up. norm: A is
    applied to x times the norm's weight, without the norm's scale.

    Args:
        x: [1, k]; if silu, [1, 2 * k].
        a: [places, r, k].
        place: int32 [1], the place of the row's adapter.
    """
    _, r, k = a.shape
    overlap = launch_for(x.device).overlap
    splits = -(-k // config.block_k)
    inner = x.new_empty(splits, r, dtype=torch.float32)
    activated = x.new_empty(1, k) if silu else x
    _shrink_row_kernel[(-(-r // config.block_r) * splits,)](
        x, a, x if norm is None else norm.weight, inner, activated, place,
        R=r, K=k, SPLITS=splits, BLOCK_R=config.block_r, BLOCK_K=config.block_k, NORM=norm is not None, SILU=silu,
        OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip
    return inner, activated
