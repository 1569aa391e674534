"""Sorts the tokens of a pass by adapter, into tiles of one adapter each. Once a pass, for all linears.

For few tokens, one program compares every token with every other. More are sorted like (token, expert) pairs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.experts.routing.plan import make_plan, most_tiles
from aengine.kernels.launch import power_of_two
from aengine.kernels.lora.base import NO_ADAPTER, TokenAdapters
from aengine.kernels.variants import keep_variants

AT_ONCE = 64  # the most tokens that one program sorts
LOW_UP_TO = 256  # up to so many tokens, tiles are low, because each adapter has few tokens
LOW, HIGH = 16, 64  # the most tokens of a tile


@keep_variants
@triton.jit(do_not_specialize=["tokens", "capacity"])
def _order_kernel(
    places_ptr,  # [tokens]
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    own_ptr,  # [tokens]
    tokens,
    capacity,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.arange(0, BLOCK)
    place = tl.load(places_ptr + token, mask=token < tokens, other=0)
    one, other = place[:, None], place[None, :]
    same = one == other
    within = tl.sum((same & (token[None, :] < token[:, None])).to(tl.int32), axis=1)  # its adapter's
    size = tl.sum(same.to(tl.int32), axis=1)
    position = tl.sum(((other > 0) & (other < one)).to(tl.int32), axis=1) + within
    used = place > 0
    first = used & (within % HEIGHT == 0)
    before = first[None, :] & (position[None, :] <= position[:, None])
    tile = tl.sum(before.to(tl.int32), axis=1) - 1
    tl.store(order_ptr + position, token, mask=used)
    tl.store(own_ptr + token, tl.where(used, tile, -1), mask=token < tokens)
    tl.store(tiles_ptr + tile, place, mask=first)
    tl.store(tiles_ptr + capacity + tile, position, mask=first)
    tl.store(tiles_ptr + 2 * capacity + tile, position + tl.minimum(size - within, HEIGHT), mask=first)
    tl.store(count_ptr, tl.sum(first.to(tl.int32), axis=0))


def height_of(tokens: int) -> int:
    """Return the most tokens of a tile."""
    return LOW if tokens <= LOW_UP_TO else HIGH


def most_tiles_of(tokens: int, places: int) -> int:
    """Return the most tiles, for any choice of adapters. places: number of places, including NO_ADAPTER."""
    return most_tiles(tokens, places if tokens > AT_ONCE else places - 1, height_of(tokens))


class TokenOrder:
    """The order of a pass's tokens, computed when `TokenAdapters.places` is set. All tensors are int32 on the device.

    Entries after the last sorted token and the last tile are undefined.
    """

    places: Tensor  # [tokens]: the place of each token's adapter
    order: Tensor  # [tokens]: the tokens with an adapter, sorted by adapter
    tiles: Tensor  # [3, capacity]: for each tile its adapter's place, and begin and end of its tokens in `order`
    count: Tensor  # [1]: the number of tiles
    own: Tensor  # [tokens]: the tile of each token, -1 without an adapter; only for passes of at most AT_ONCE
    height: int  # the most tokens of a tile

    def __init__(self, places: int, tokens: TokenAdapters) -> None:
        """places: number of places, including NO_ADAPTER."""
        self._places = places
        tokens.follow(self._sort)
        if tokens.places is not None:
            self._sort(tokens.places)

    @property
    def capacity(self) -> int:
        """The most tiles."""
        return self.tiles.shape[1]

    def _sort(self, places: Tensor) -> None:
        tokens = len(places)
        self.places = places = places.contiguous()
        self.height = height_of(tokens)
        if tokens > AT_ONCE:
            plan = make_plan(places.masked_fill(places == NO_ADAPTER, -1).unsqueeze(-1), self._places, self.height)
            self.order, self.tiles, self.count = plan.order, plan.tiles, plan.count
            return
        capacity = most_tiles_of(tokens, self._places)
        self.order, self.own = places.new_empty(2, -(-tokens // 4) * 4)[:, :tokens]  # both are aligned
        self.tiles, self.count = places.new_empty(3, capacity), places.new_empty(1)
        if tokens:  # an ordinary launch, because later kernels read its results before their wait
            _order_kernel[(1,)](
                places, self.order, self.tiles, self.count, self.own, tokens, capacity,
                HEIGHT=self.height, BLOCK=max(16, power_of_two(tokens)), num_warps=4,
            )  # fmt: skip
