"""How attention over latents cuts its work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from aengine.kernels.launch import Launch, power_of_two

MOST_HEADS = 32  # of a tile of single queries: what they have attended to stays in registers; half of it in float32


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """block: latents at a time; stages: depth of the copy pipeline; crowd: programs on each processor at once."""

    block: int
    stages: int
    warps: int
    crowd: int = 1

    def shared_memory(self, queries: int, width: int, element_size: int) -> int:
        """Bytes: the latents of all stages, the queries, the weights. width: of a latent, as it is padded."""
        return (self.stages * self.block * width + queries * (width + self.block)) * element_size + 8 * queries


@lru_cache
def decode_config(queries: int, width: int, element_size: int, launch: Launch) -> LatentConfig:
    """queries: heads of a tile, as they are padded."""
    config = LatentConfig(block=32, stages=3, warps=4) if element_size <= 2 else LatentConfig(16, 2, 4)
    return _fitting(config, queries, width, element_size, launch)


@lru_cache
def chunk_config(queries: int, width: int, element_size: int, launch: Launch) -> LatentConfig:
    """queries: rows of a tile."""
    config = LatentConfig(block=64, stages=2, warps=8) if element_size <= 2 else LatentConfig(16, 2, 4)
    return _fitting(config, queries, width, element_size, launch)


def tile_heads(heads: int, element_size: int) -> int:
    """How many heads' single queries are in one tile, which is padded to a power of two."""
    tiles = -(-heads // (MOST_HEADS if element_size <= 2 else MOST_HEADS // 2))
    return -(-heads // tiles)


def chunk_rows(queries: int, element_size: int, launch: Launch) -> int:
    """The height of a tile of chunks, whose queries are in shared memory. queries: of all tokens' heads."""
    most = 16 if element_size > 2 else 64 if launch.shared_memory >= 160 * 1024 else 32
    return min(most, max(16, power_of_two(queries)))


def _fitting(config: LatentConfig, queries: int, width: int, element_size: int, launch: Launch) -> LatentConfig:
    """With smaller blocks where there is less shared memory."""
    while config.shared_memory(queries, width, element_size) > launch.shared_memory and config.block > 16:
        config = replace(config, block=config.block // 2)
    while config.shared_memory(queries, width, element_size) > launch.shared_memory and config.stages > 1:
        config = replace(config, stages=config.stages - 1)
    return config
