"""A counting sort of (token, expert) pairs by expert, on the device, and the tiles of rows that follow from it.

For few pairs, a program for each expert reads all pairs. It counts them, so it knows where its own begin, and writes
these in order. For many pairs there are three launches: programs count blocks of pairs, the counts are added up over
the blocks, and each block's pairs are placed. The order is always the same.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants

AT_ONCE = (256, 1024, 2048, 4096)  # pairs that the programs of all experts read, padded to one of these
BLOCK = 128  # pairs of a program, if there are more
MOST_PAIRS = 2**21 - 1  # three numbers of 21 bits make one of 63
_MOST = tl.constexpr(MOST_PAIRS)
_BITS = tl.constexpr(21)


@keep_variants
@triton.jit(do_not_specialize=["pairs", "capacity"])
def _plan_kernel(
    ids_ptr,  # [pairs]
    order_ptr,  # [pairs]
    places_ptr,  # [pairs]
    ends_ptr,  # [E]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    pairs,
    capacity,
    E: tl.constexpr,
    BINS: tl.constexpr,  # at least E
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,  # at least `pairs`
    OVERLAP: tl.constexpr,
):
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    ids = tl.load(ids_ptr + block, mask=block < pairs, other=E)
    own = (ids == expert).to(tl.int32)
    before = tl.cumsum(own, axis=0) - 1
    counts = _histogram(ids, E, BINS)
    place = _write_tiles(counts, expert, ends_ptr, tiles_ptr, count_ptr, capacity, E, BINS, HEIGHT) + before
    tl.store(order_ptr + place, block, mask=own == 1)
    tl.store(places_ptr + block, place, mask=own == 1)


@triton.jit
def _histogram(ids, E: tl.constexpr, BINS: tl.constexpr):
    """Count the ids of 0..E-1, [BINS]. Other ids do not count."""
    return tl.histogram(ids, BINS, mask=(ids >= 0) & (ids < E))


@triton.jit
def _write_tiles(
    counts, expert, ends_ptr, tiles_ptr, count_ptr, capacity, E: tl.constexpr, BINS: tl.constexpr, HEIGHT: tl.constexpr
):
    """Store one expert's end and tiles, given the number of pairs of each expert [BINS]. Return where its pairs
    begin.
    """
    # One sum has three parts, because each sum is a round through shared memory: pairs before, tiles before, own pairs.
    bins = tl.arange(0, BINS)
    pairs = counts.to(tl.int64)
    tiles = (pairs + HEIGHT - 1) // HEIGHT
    of_own = tl.where(bins == expert, pairs << _BITS << _BITS, 0)
    sums = tl.sum(tl.where(bins < expert, pairs | tiles << _BITS, of_own))
    start = (sums & _MOST).to(tl.int32)
    first = (sums >> _BITS & _MOST).to(tl.int32)
    end = start + (sums >> _BITS >> _BITS).to(tl.int32)
    number = (end - start + HEIGHT - 1) // HEIGHT
    tl.store(ends_ptr + expert, end)
    if expert == E - 1:
        tl.store(count_ptr, first + number)
    for begin in range(0, number, 64):
        tile = begin + tl.arange(0, 64)
        row = start + tile * HEIGHT
        own = tile < number
        tl.store(tiles_ptr + first + tile, tl.full([64], expert, tl.int32), mask=own)
        tl.store(tiles_ptr + capacity + first + tile, row, mask=own)
        tl.store(tiles_ptr + 2 * capacity + first + tile, tl.minimum(row + HEIGHT, end), mask=own)
    return start


@keep_variants
@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    ids_ptr,  # [pairs]
    counts_ptr,  # [blocks, BINS]
    pairs,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=E)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), _histogram(ids, E, BINS))


@keep_variants
@triton.jit(do_not_specialize=["blocks"])
def _add_up_kernel(
    counts_ptr,  # [blocks + 1, BINS]: each row becomes the sum of the rows before it, the last row the sum of all
    blocks,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,  # bins of a program
    AT_ONCE: tl.constexpr,  # blocks
    OVERLAP: tl.constexpr,
):
    bins = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    before = tl.zeros([WIDTH], tl.int32)
    for begin in range(0, blocks, AT_ONCE):
        block = begin + tl.arange(0, AT_ONCE)[:, None]
        place = counts_ptr + block * BINS + bins[None, :]
        counts = tl.load(place, mask=block < blocks, other=0)
        tl.store(place, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=block < blocks)
        before += tl.sum(counts, axis=0)
    tl.store(counts_ptr + blocks * BINS + bins, before)


@keep_variants
@triton.jit(do_not_specialize=["pairs", "blocks", "capacity"])
def _place_kernel(
    ids_ptr,  # [pairs]
    counts_ptr,  # [blocks + 1, BINS], added up
    order_ptr,  # [pairs]
    places_ptr,  # [pairs]
    ends_ptr,  # [E]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    pairs,
    blocks,
    capacity,
    E: tl.constexpr,
    BINS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    one = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(counts_ptr + blocks * BINS + bins)
    # A block's first pair of an expert goes after the pairs of smaller experts, and after its own of earlier blocks.
    first = tl.cumsum(total, axis=0) - total + tl.load(counts_ptr + block * BINS + bins)
    pair = block * BLOCK + one
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=E)
    known = (ids >= 0) & (ids < E)
    earlier = (ids[:, None] == ids[None, :]) & (one[:, None] > one[None, :])
    place = tl.gather(first, tl.where(known, ids, 0), 0) + tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order_ptr + place, pair, mask=known)
    tl.store(places_ptr + pair, place, mask=known)
    for expert in range(block, E, blocks):
        _write_tiles(total, expert, ends_ptr, tiles_ptr, count_ptr, capacity, E, BINS, HEIGHT)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each pair goes. Pair t * top_k + j is token t's j-th choice. All tensors are int32, on the device.

    Values after the last row and the last tile are undefined, and so are places of pairs that go nowhere.
    """

    order: Tensor  # [pairs]: the pair of each sorted row
    places: Tensor  # [pairs]: the sorted row of each pair
    ends: Tensor  # [experts]: the end of each expert's rows
    tiles: Tensor  # [3, capacity]: the expert of each tile, its first row, the end of its rows
    count: Tensor  # [1]: the number of tiles

    @property
    def capacity(self) -> int:
        """Return the most tiles there can be."""
        return self.tiles.shape[1]


def pairs_at_once(pairs: int) -> int | None:
    """Return the number of pairs that each expert's program reads, padded; None: blocks of pairs are counted first."""
    return next((size for size in AT_ONCE if pairs <= size), None)


def most_tiles(pairs: int, experts: int, height: int) -> int:
    """Return the most tiles of `height` rows there can be, for any spread of the pairs."""
    used = min(pairs, experts)
    return (pairs - used) // height + used


def make_plan(ids: Tensor, experts: int, height: int) -> Plan:
    """Sort ids int32 [tokens, top_k] into tiles of one expert each. Ids outside of 0..experts-1 go nowhere.

    height: the most rows of a tile. This only enqueues; the sizes depend on the shape of `ids` alone. Raises:
    ValueError for more than `MOST_PAIRS` pairs.
    """
    ids = ids.contiguous()
    pairs = ids.numel()
    if pairs > MOST_PAIRS:
        raise ValueError(f"{pairs} pairs of tokens and experts are more than {MOST_PAIRS}: give fewer tokens")
    capacity = most_tiles(pairs, experts, height)
    overlap = launch_for(ids.device).overlap
    # Each is padded to whole 16 bytes, so that kernels are compiled for aligned pointers alone.
    places, order = ids.new_empty(2, -(-pairs // 4) * 4)[:, :pairs]
    plan = Plan(order, places, ids.new_empty(experts), ids.new_empty(3, capacity), ids.new_empty(1))
    bins = power_of_two(max(2, experts))
    sizes = {"E": experts, "BINS": bins, "OVERLAP": overlap, "launch_pdl": overlap}
    block = pairs_at_once(pairs)
    if block is not None:
        _plan_kernel[(experts,)](
            ids, plan.order, plan.places, plan.ends, plan.tiles, plan.count, pairs, capacity,
            HEIGHT=height, BLOCK=block, num_warps=8 if block >= 2048 else 4, **sizes,
        )  # fmt: skip
        return plan
    blocks = -(-pairs // BLOCK)
    counts = ids.new_empty(blocks + 1, bins)
    _count_kernel[(blocks,)](ids, counts, pairs, BLOCK=BLOCK, num_warps=4, **sizes)
    width = min(bins, 16)
    _add_up_kernel[(bins // width,)](
        counts, blocks, BINS=bins, WIDTH=width, AT_ONCE=256, OVERLAP=overlap, num_warps=8, launch_pdl=overlap
    )
    _place_kernel[(blocks,)](
        ids, counts, plan.order, plan.places, plan.ends, plan.tiles, plan.count, pairs, blocks, capacity,
        HEIGHT=height, BLOCK=BLOCK, num_warps=4, **sizes,
    )  # fmt: skip
    return plan
