"""A counting sort of (token, expert) pairs by expert, on the device, and the tiles of rows that follow from it.

A program for each expert reads all pairs twice: it counts them, so it knows where its own begin, and writes these in
their order. Nothing is passed between programs, so one launch is enough, and the order is always the same.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two

MOST_AT_ONCE = 4096  # pairs


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
    BINS: tl.constexpr,  # more than E
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    block = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + begin + block, mask=begin + block < pairs, other=E)
        known = (ids >= 0) & (ids < E)
        counts += tl.histogram(tl.where(known, ids, E), BINS)  # the bin E is for all that go nowhere
    counts = tl.where(bins < E, counts, 0)
    start = tl.sum(tl.where(bins < expert, counts, 0))
    end = start + tl.sum(tl.where(bins == expert, counts, 0))
    tiles = (counts + HEIGHT - 1) // HEIGHT
    first = tl.sum(tl.where(bins < expert, tiles, 0))
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
    if end > start:
        before = start
        for begin in range(0, pairs, BLOCK):
            ids = tl.load(ids_ptr + begin + block, mask=begin + block < pairs, other=E)
            own = (ids == expert).to(tl.int32)
            place = before + tl.cumsum(own, axis=0) - 1
            tl.store(order_ptr + place, begin + block, mask=own == 1)
            tl.store(places_ptr + begin + block, place, mask=own == 1)
            before += tl.sum(own)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each pair goes; pair t * top_k + j is token t's j-th choice. All int32, and on the device.

    What lies behind the last row and the last tile is undefined, as are places of pairs that go nowhere.
    """

    order: Tensor  # [pairs]: the pair of each sorted row
    places: Tensor  # [pairs]: the sorted row of each pair
    ends: Tensor  # [experts]: behind the last row of each
    tiles: Tensor  # [3, capacity]: the expert of each tile, its first row, the row behind its last
    count: Tensor  # [1]: the number of tiles

    @property
    def capacity(self) -> int:
        """Tiles at most."""
        return self.tiles.shape[1]


def most_tiles(pairs: int, experts: int, height: int) -> int:
    """How many tiles of `height` rows there are at most, however the pairs are spread."""
    used = min(pairs, experts)
    return (pairs - used) // height + used


def make_plan(ids: Tensor, experts: int, height: int) -> Plan:
    """Sort ids int32 [tokens, top_k], of which those outside of 0..experts-1 go nowhere, into tiles of one expert each.

    height: rows of a tile at most. Enqueues only; the sizes depend on the shape of `ids` alone.
    """
    ids = ids.contiguous()
    pairs = ids.numel()
    capacity = most_tiles(pairs, experts, height)
    overlap = launch_for(ids.device).overlap
    places, order = ids.new_empty(2, pairs)
    plan = Plan(order, places, ids.new_empty(experts), ids.new_empty(3, capacity), ids.new_empty(1))
    block = max(32, min(MOST_AT_ONCE, power_of_two(pairs)))
    _plan_kernel[(experts,)](
        ids, plan.order, plan.places, plan.ends, plan.tiles, plan.count, pairs, capacity,
        E=experts, BINS=power_of_two(experts + 1), HEIGHT=height, BLOCK=block, OVERLAP=overlap,
        num_warps=8 if block >= 2048 else 4, launch_pdl=overlap,
    )  # fmt: skip
    return plan
