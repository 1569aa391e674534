"""inner = A x of each token's own adapter, for any mix of adapters, with what makes x in the same launch: a norm, or
SiLU(gate) * up.

A program owns a tile of tokens of one adapter, some rows of A and one of SPLITS pieces of its columns, the first of
which are on their way before it waits for the kernel that makes its input. The last program to arrive at a tile adds
the pieces up in order. Further programs write x for the product: they and those that shrink wait for nobody.
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
from aengine.kernels.parts import Parts
from aengine.kernels.variants import keep_variants

MOST_COLUMNS = 16384  # of a row that is normed by one program
ACTIVATED = 2048  # columns of a program that writes SiLU(gate) * up


@keep_variants
@triton.jit(do_not_specialize=["tokens", "capacity"])
def _shrink_kernel(
    x_ptr,  # [tokens, K]; with SILU [tokens, 2 * K]
    a_ptr,  # [places, R, K]
    norm_ptr,  # [K], NORM only
    inner_ptr,  # [tokens, R] float32
    made_ptr,  # [tokens, K]: x for the product, NORM and SILU only
    part_ptr,  # [capacity * blocks of rows, SPLITS, BLOCK_R + 1, HEIGHT] float32
    arrived_ptr,  # [capacity * blocks of rows] int32, zero between launches
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    eps,
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
    WHOLE: tl.constexpr,  # columns of a program that writes x
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    PIECE: tl.constexpr = ((K + 15) // 16 + SPLITS - 1) // SPLITS * 16
    WIDTH: tl.constexpr = 2 * K if SILU else K
    dtype = a_ptr.dtype.element_ty
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS % BLOCKS
    tile = tl.program_id(0) // (SPLITS * BLOCKS)
    if OVERLAP:
        gdc_launch_dependents()
    if tile >= capacity:
        program = tl.program_id(0) - capacity * (SPLITS * BLOCKS)
        if NORM:
            _norm_row(x_ptr, norm_ptr, made_ptr, program, eps, K, WHOLE, OVERLAP)
        if SILU:
            _activate(x_ptr, made_ptr, program, K, WHOLE, OVERLAP)
    else:
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
            x_rows = (x_ptr + token.to(tl.int64) * WIDTH + split * PIECE)[:, None]
            norm_row = norm_ptr + split * PIECE
            early_k = tl.arange(0, EARLY)[None, :]
            k = tl.arange(0, BLOCK_K)[None, :]
            inside = early_k < left
            a_early = tl.load(a_rows + early_k, mask=inside, other=0.0)
            norm_early = tl.load(norm_row + early_k, mask=inside, other=0.0) if NORM else a_early
            if OVERLAP:
                gdc_wait()
            x_early = _load(x_rows + early_k, used[:, None] & inside, K, SILU)
            acc = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
            squares = tl.zeros([HEIGHT], tl.float32)
            for step in tl.range(EARLY, PIECE, BLOCK_K, num_stages=STAGES):
                within = step + k < left
                a = tl.load(a_rows + step + k, mask=within, other=0.0)
                x = _load(x_rows + step + k, used[:, None] & within, K, SILU)
                if NORM:
                    wide = x.to(tl.float32)
                    squares += tl.sum(wide * wide, axis=1)
                    x = (wide * tl.load(norm_row + step + k, mask=within, other=0.0).to(tl.float32)).to(dtype)
                acc = tl.dot(a, tl.trans(x), acc, input_precision=PRECISION)
            if NORM:
                wide = x_early.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                x_early = (wide * norm_early.to(tl.float32)).to(dtype)
            elif not SILU:
                x_early = not_before(x_early, OVERLAP)
            acc = tl.dot(a_early, tl.trans(x_early), acc, input_precision=PRECISION)
            out = inner_ptr + token.to(tl.int64)[None, :] * R + r[:, None]
            stored = used[None, :] & (r < R)[:, None]
            if SPLITS == 1:
                if NORM:
                    acc *= tl.math.rsqrt(squares / K + eps)[None, :]
                tl.store(out, acc, mask=stored)
            else:
                SIZE: tl.constexpr = (BLOCK_R + 1) * HEIGHT  # the sums of squares come last
                whose = tile * BLOCKS + block
                columns = part_ptr + whose.to(tl.int64) * (SPLITS * SIZE) + tl.arange(0, HEIGHT)
                parts = columns[None, :] + tl.arange(0, BLOCK_R)[:, None] * HEIGHT
                tl.store(parts + split * SIZE, acc)
                if NORM:
                    tl.store(columns + split * SIZE + BLOCK_R * HEIGHT, squares)
                tl.debug_barrier()  # every thread's part is stored before one of them announces it
                if tl.atomic_add(arrived_ptr + whose, 1, sem="acq_rel") == SPLITS - 1:
                    tl.debug_barrier()
                    tl.store(arrived_ptr + whose, 0)
                    total = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
                    square = tl.zeros([HEIGHT], tl.float32)
                    for other in tl.static_range(SPLITS):
                        # Other processors wrote these: read past the first-level cache.
                        total += tl.load(parts + other * SIZE, cache_modifier=".cg")
                        if NORM:
                            square += tl.load(columns + other * SIZE + BLOCK_R * HEIGHT, cache_modifier=".cg")
                    if NORM:
                        total *= tl.math.rsqrt(square / K + eps)[None, :]
                    tl.store(out, total, mask=stored)


@triton.jit
def _load(x, mask, K: tl.constexpr, SILU: tl.constexpr):
    """x at these pointers; with SILU what gate and up there, K further on, make."""
    value = tl.load(x, mask=mask, other=0.0)
    if SILU:
        value = _silu_mul(value, tl.load(x + K, mask=mask, other=0.0))
    return value


@triton.jit
def _silu_mul(gate, up):
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _norm_row(x_ptr, norm_ptr, made_ptr, row, eps, K: tl.constexpr, WHOLE: tl.constexpr, OVERLAP: tl.constexpr):
    """A row's norm, as in `rms_norm`."""
    k = tl.arange(0, WHOLE)
    inside = k < K
    weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    at = row.to(tl.int64) * K + k
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / K + eps)
    tl.store(made_ptr + at, ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype), mask=inside)


@triton.jit
def _activate(x_ptr, made_ptr, program, K: tl.constexpr, WHOLE: tl.constexpr, OVERLAP: tl.constexpr):
    """SiLU(gate) * up of some columns of a row."""
    PROGRAMS: tl.constexpr = (K + WHOLE - 1) // WHOLE
    row = (program // PROGRAMS).to(tl.int64)
    k = program % PROGRAMS * WHOLE + tl.arange(0, WHOLE)
    inside = k < K
    if OVERLAP:
        gdc_wait()
    tl.store(made_ptr + row * K + k, _load(x_ptr + row * (2 * K) + k, inside, K, True), mask=inside)


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


def shrink(
    x: Tensor,
    a: Tensor,
    order: TokenOrder,
    config: ShrinkConfig,
    scratch: Parts,
    norm: Norm | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [tokens, k], or [tokens, 2 * k] with silu, a [places, r, k], both contiguous -> inner, and x for the product.

    inner [tokens, r] float32 is A x, undefined for tokens without an adapter. With a norm, k at most MOST_COLUMNS, both
    are of norm(x); with silu of SiLU(gate) * up; else x stays what it is.
    """
    (tokens, _), (_, r, k) = x.shape, a.shape
    overlap = launch_for(x.device).overlap
    inner = x.new_empty(tokens, r, dtype=torch.float32)
    made = x if norm is None and not silu else x.new_empty(tokens, k)
    whole = power_of_two(k) if norm is not None else min(ACTIVATED, power_of_two(k))
    writers = 0 if made is x else tokens * -(-k // whole)
    shared = order.capacity * -(-r // config.block_r)
    size = (config.block_r + 1) * order.height
    parts, arrived = scratch(x.device, shared * config.splits * size, shared) if config.splits > 1 else (x, x)
    _shrink_kernel[(shared * config.splits + writers,)](
        x, a, x if norm is None else norm.weight, inner, made, parts, arrived, order.order, order.tiles, order.count,
        0.0 if norm is None else norm.eps, tokens, order.capacity,
        R=r, K=k, HEIGHT=order.height, BLOCK_R=config.block_r, BLOCK_K=config.block_k, SPLITS=config.splits,
        STAGES=config.stages, EARLY=config.early, WHOLE=whole, NORM=norm is not None, SILU=silu,
        PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=overlap, num_warps=config.warps,
        launch_pdl=overlap,
    )  # fmt: skip
    return inner, made
