"""How the kernels of adapters divide their work, by shape."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from aengine.kernels.experts.routing.plan import pairs_at_once
from aengine.kernels.launch import Launch, find_borders, power_of_two
from aengine.kernels.lora.expand import ExpandConfig
from aengine.kernels.lora.order import AT_ONCE, height_of, most_tiles_of
from aengine.kernels.lora.shrink import ShrinkConfig, ShrinkFewConfig, ShrinkRowConfig

FEW_TILES = 32  # up to so many tiles, programs may be large


def adapter_borders(places: int, launch: Launch, most: int) -> list[int]:
    """Return the numbers of tokens below `most` after which tokens are sorted, or multiplied, by other kernels.

    places: number of places, including NO_ADAPTER.
    """

    def kernels(tokens: int) -> tuple[object, ...]:
        sorting = power_of_two(max(16, tokens)) if tokens <= AT_ONCE else pairs_at_once(tokens)
        height = height_of(tokens)
        # The number of tiles decides, so any rank and any long row will do.
        return sorting, height, shrink_config(most_tiles_of(tokens, places), height, 16, 4096, 2, launch)

    return find_borders(kernels, most)


@lru_cache
def shrink_row_config(r: int, k: int) -> ShrinkRowConfig:
    """Return the config for one row. A program starts all its loads at once."""
    block_k = min(2048, power_of_two(k))
    return ShrinkRowConfig(2 if r >= 16 else 1, block_k, max(1, block_k // 512))


@lru_cache
def shrink_config(tiles: int, height: int, r: int, k: int, element_size: int, launch: Launch) -> ShrinkConfig:
    """Return the config for `tiles` tiles of `height` tokens. With less shared memory there are fewer stages."""
    config = _shrink_config(tiles, height, r, k, element_size, launch)
    while config.stages > 1 and config.shared_memory(height, element_size) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config


def _shrink_config(tiles: int, height: int, r: int, k: int, element_size: int, launch: Launch) -> ShrinkConfig:
    if element_size > 2:
        return ShrinkConfig(16, 32, 2 if k >= 512 else 1, 2, 4, 16)
    if height > 16:  # with enough tiles for every processor, fewer pieces
        splits = 1 if k < 2048 else 2 if tiles > 64 else 4
        return ShrinkConfig(min(64, max(16, power_of_two(r))), 64, splits, 4 if splits < 4 else 6, 4, 64)
    # Each program loads its part of A before the wait. Many tiles need many programs, so these must be small.
    piece = 512 if k > 512 else max(16, power_of_two(k))
    block_r, warps = (64, 4) if tiles <= FEW_TILES else (16, 2)
    return ShrinkConfig(block_r, piece, -(-k // piece), 1, warps, piece)


@lru_cache
def shrink_few_config(k: int, element_size: int) -> ShrinkFewConfig:
    """Return the config for 2 to 64 rows. During this kernel the product that follows loads its weight."""
    if element_size > 2:
        return ShrinkFewConfig(16, 32, 4, 2, 4, 1)
    return ShrinkFewConfig(16, 128, 8, 3, 2, 4) if k <= 4096 else ShrinkFewConfig(16, 128, 16, 3, 2, 2)


@lru_cache
def expand_config(height: int, element_size: int) -> ExpandConfig:
    """Return the config for tiles of `height` tokens."""
    if element_size > 2:
        return ExpandConfig(32, 4)
    return ExpandConfig(256, 4) if height <= 16 else ExpandConfig(128, 8)
