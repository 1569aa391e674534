"""How the kernels of adapters are cut up, by shape."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from aengine.kernels.experts.routing.plan import AT_ONCE as PLANNED_AT_ONCE
from aengine.kernels.launch import Launch, power_of_two
from aengine.kernels.lora.expand import ExpandConfig
from aengine.kernels.lora.order import AT_ONCE, LOW_UP_TO, most_tiles_of
from aengine.kernels.lora.shrink import ShrinkConfig
from aengine.kernels.lora.shrink_few import ShrinkFewConfig
from aengine.kernels.lora.shrink_row import ShrinkRowConfig

FEW_TILES = 32


def adapter_borders(places: int) -> list[int]:
    """Numbers of tokens, ascending: beyond each, other kernels may sort them or multiply with their adapters.

    places: how many there are, with the one of no adapter.
    """
    few = [tokens for tokens in range(1, LOW_UP_TO + 1) if most_tiles_of(tokens, places) <= FEW_TILES]
    sorting = [16 << power for power in range(AT_ONCE.bit_length()) if 16 << power <= AT_ONCE]
    return sorted({*sorting, few[-1], LOW_UP_TO, *PLANNED_AT_ONCE})


@lru_cache
def shrink_row_config(r: int, k: int) -> ShrinkRowConfig:
    """Of one row: all loads of a program are on their way at once."""
    block_k = min(2048, power_of_two(k))
    return ShrinkRowConfig(2 if r >= 16 else 1, block_k, max(1, block_k // 512))


@lru_cache
def shrink_config(tiles: int, height: int, r: int, k: int, element_size: int, launch: Launch) -> ShrinkConfig:
    """tiles: at most so many, of `height` tokens. Where there is less shared memory, fewer copies are on their way."""
    config = _shrink_config(tiles, height, r, k, element_size, launch)
    while config.stages > 1 and config.shared_memory(height, element_size) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config


def _shrink_config(tiles: int, height: int, r: int, k: int, element_size: int, launch: Launch) -> ShrinkConfig:
    if element_size > 2:
        return ShrinkConfig(16, 32, 2 if k >= 512 else 1, 2, 4, 16)
    if height > 16:  # enough tiles for every processor need fewer pieces
        splits = 1 if k < 2048 else 2 if tiles > 64 else 4
        return ShrinkConfig(min(64, max(16, power_of_two(r))), 64, splits, 4 if splits < 4 else 6, 4, 64)
    # All of A is on its way before the wait. Many tiles take many programs, which have to be small.
    piece = 512 if k > 512 else max(16, power_of_two(k))
    block_r, warps = (64, 4) if tiles <= FEW_TILES else (16, 2)
    return ShrinkConfig(block_r, piece, -(-k // piece), 1, warps, piece)


@lru_cache
def shrink_few_config(k: int, element_size: int) -> ShrinkFewConfig:
    """Of 2 to 64 rows, whose product streams its weight meanwhile."""
    if element_size > 2:
        return ShrinkFewConfig(16, 32, 4, 2, 4, 1)
    return ShrinkFewConfig(16, 128, 8, 3, 2, 4) if k <= 4096 else ShrinkFewConfig(16, 128, 16, 3, 2, 2)


@lru_cache
def expand_config(height: int, element_size: int) -> ExpandConfig:
    """height: of a tile of tokens."""
    if element_size > 2:
        return ExpandConfig(32, 4)
    return ExpandConfig(256, 4) if height <= 16 else ExpandConfig(128, 8)
