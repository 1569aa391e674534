"""inner = A x of each token's own adapter for a handful of tokens, laid out as further columns of x for the product
behind it.

A program owns a tile of tokens of one adapter, some rows of A and one of several pieces of its columns: as many pieces
as keep all programs busy, so few adapters are cut finer than many. The product's weight streams meanwhile. The last
program to arrive at a tile adds the pieces up in order.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.lora.order import TokenOrder
from aengine.kernels.parts import Parts
from aengine.kernels.variants import keep_variants


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
        if (program == 0) | (program < shared * pieces):  # others make room for the product
            gdc_wait()
            gdc_launch_dependents()  # what this kernel waited for, the next one may read at once
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
        tl.debug_barrier()  # every thread's part is stored before one of them announces it
        if tl.atomic_add(arrived_ptr + whose, 1, sem="acq_rel") == pieces - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + whose, 0)
            total = tl.zeros([BLOCK_R, HEIGHT], tl.float32)
            for other in tl.range(0, pieces, num_stages=1):
                # Other processors wrote these: read past the first-level cache.
                total += tl.load(parts + other * SIZE, cache_modifier=".cg")
            # The tile's columns are its own tokens'; those of all others are zero there.
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
    """How one shape is cut up. pieces: of the columns, at most; programs: for each processor."""

    block_r: int
    block_k: int
    pieces: int
    stages: int
    warps: int
    programs: int


def shrink_few(x: Tensor, a: Tensor, rank: int, order: TokenOrder, config: ShrinkFewConfig, scratch: Parts) -> Tensor:
    """x [tokens, k], a [places, parts * rank, k], both contiguous -> [tokens, parts, tiles, rank] in a's dtype.

    tokens: as many as have tiles of their own in `order`. The columns of the tiles that there are hold A x of their
    tokens, and zeros for all others; what lies behind these tiles is undefined.
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
