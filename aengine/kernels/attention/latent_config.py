"""How attention over latents cuts its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from aengine.kernels.launch import Launch

MOST_HEADS = 32  # of a tile of single queries: what they have attended to stays in registers; half of it in float32


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """block: latents at a time; stages: depth of the copy pipeline; crowd: programs on each processor at once."""

    block: int
    stages: int
    warps: int
    crowd: int = 1

    def shared_memory(self, queries: int, width: int, values: int, element_size: int, copies: int) -> int:
        """Bytes: what is kept of so many blocks, the queries, the weights. width: of keys and queries, as they are
        padded; values: of values, where these are no part of keys."""
        kept = copies * self.block * (width + values)
        return (kept + queries * (width + self.block)) * element_size + 8 * queries


@lru_cache
def decode_config(
    rows: int, queries: int, width: int, element_size: int, launch: Launch, codes: bool = False
) -> LatentConfig:
    """queries: heads of a tile, as they are padded; codes: latents are FP8, which takes more threads to turn into
    numbers. Measured on an H200 for queries of 2-byte elements (bench/KERNELS.md).
    """
    config = LatentConfig(block=32, stages=4 if rows <= 8 else 3, warps=4, crowd=1 if rows <= 8 else 2)
    if codes and rows <= 8:
        config = LatentConfig(block=32, stages=3, warps=8)
    if element_size > 2:
        config = LatentConfig(block=16, stages=2, warps=4)
    # Blocks of less than 64 rows are multiplied out of registers: the last copy's room is free by then.
    config, need = _fitting(config, queries, width, 0, element_size, launch, lambda config: config.stages - 1)
    # A program has 1 KB beside its own.
    return replace(config, crowd=max(1, min(config.crowd, (launch.shared_memory + 1024) // (need + 1024))))


@lru_cache
def chunk_config(queries: int, width: int, values: int, element_size: int, launch: Launch) -> LatentConfig:
    """queries: rows of a tile; width, values: see `shared_memory`."""
    config = LatentConfig(block=64, stages=2, warps=8) if element_size <= 2 else LatentConfig(16, 2, 4)
    return _fitting(config, queries, width, values, element_size, launch, lambda config: config.stages)[0]


def tile_heads(heads: int, element_size: int) -> int:
    """How many heads' single queries are in one tile, which is padded to a power of two."""
    tiles = -(-heads // (MOST_HEADS if element_size <= 2 else MOST_HEADS // 2))
    return -(-heads // tiles)


def chunk_rows(element_size: int, launch: Launch) -> int:
    """The height of a tile of chunks, whose queries are in shared memory: one for all, so that nothing is compiled when
    the first chunk of one token comes.
    """
    return 16 if element_size > 2 else 64 if launch.shared_memory >= 160 * 1024 else 32


def _fitting(
    config: LatentConfig, queries: int, width: int, values: int, element_size: int, launch: Launch,
    copies: Callable[[LatentConfig], int],
) -> tuple[LatentConfig, int]:  # fmt: skip
    """With smaller blocks where there is less shared memory, and fewer; and how much of it they take."""
    while (need := config.shared_memory(queries, width, values, element_size, copies(config))) > launch.shared_memory:
        if config.block > 16:
            config = replace(config, block=config.block // 2)
        elif config.stages > 1:
            config = replace(config, stages=config.stages - 1)
        else:
            break
    return config, need
