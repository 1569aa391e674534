"""How kernels of attention divide their work, by measurements (bench/KERNELS.md)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from aengine.kernels.launch import Launch, find_borders, power_of_two

# Prefill kernels are compiled for this many sequences, the default limit. So one variant serves every step.
LEAST_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode attention divides its work.

    crowd must be exactly the number of programs that fit on a processor. If one more fitted, programs of the next
    launch would start early, and would be spread unevenly.
    """

    block: int  # keys of an iteration
    stages: int  # stages of the copy pipeline
    warps: int
    crowd: int  # programs on each processor at once
    merged: int = 4096  # elements of parts that are added up in one step; see `parts_at_once`
    piece: int = 1  # the fewest blocks of a program; with a larger number a short row has fewer parts

    def shared_memory(
        self, group: int, dim: int, element_size: int, kept_size: int = 0, warp_groups: bool = False
    ) -> int:
        """Return the bytes for the keys and values of all stages, the queries and the weights.

        dim: padded. kept_size: bytes of an element of the cache; 0: same as `element_size`. warp_groups: as in
        `Launch`; then the block being multiplied stays in shared memory, too.
        """
        if element_size > 2:  # a product of float32 needs all elements in float32
            kept_size = 0
        blocks = self.stages if warp_groups and self.warps % 4 == 0 else self.stages - 1
        copies = blocks * 2 * self.block * dim * (kept_size or element_size)
        # Warps exchange 4 bytes a head, and 16 more for codes on a B200.
        return copies + group_pad(group) * ((dim + self.block) * element_size + 20)


# Small programs let programs of the next product start. This is fastest in a complete step, though not alone.
ONE_ROW = DecodeConfig(block=32, stages=3, warps=2, crowd=3, merged=8192)
# For heads of dim 256 with one row, or with more than four query heads, whose parts are larger.
WIDE_HEADS = DecodeConfig(block=32, stages=2, warps=2, crowd=4, merged=8192)
# For windows that fit into one block.
IN_ONE = DecodeConfig(block=128, stages=2, warps=4, crowd=2)
# A program of one warp never waits for another warp. Eight programs overlap the ends of each other's rows.
ONE_WARP = DecodeConfig(block=64, stages=2, warps=1, crowd=8)
# Like ONE_WARP, for five to eight query heads, which fill a product: more stages, or with many rows more programs.
FULL_PRODUCTS = DecodeConfig(block=32, stages=4, warps=1, crowd=4)
FULL_PRODUCTS_OF_MANY = DecodeConfig(block=32, stages=2, warps=1, crowd=8)

# For a tile of several queries with more than 16 columns, and with more than 32. Its results would fill the registers
# of two warps.
SEVERAL_COLUMNS = DecodeConfig(block=32, stages=3, warps=4, crowd=2, piece=4)
MANY_COLUMNS = DecodeConfig(block=32, stages=4, warps=4, crowd=2)
MOST_RESULTS = 64 * 128  # elements of the results of a program with several queries


def group_pad(group: int) -> int:
    """Return the width of a matrix product over `group` query heads."""
    return max(8, power_of_two(group))


@lru_cache
def decode_config(
    rows: int, group: int, dim: int, element_size: int, launch: Launch, shared: bool = False, kept_size: int = 0,
    window: int | None = None, drafted: bool = False,
) -> DecodeConfig:  # fmt: skip
    """Return the config of decode attention. With less shared memory, blocks are smaller and there are fewer programs.

    Configs for 2-byte elements and dim 64 to 256 were measured on an H200. Others are only chosen to fit.

    Args:
        group: Query heads of each KV head. If drafted, the heads of all queries of a tile.
        dim: Padded.
        shared: Whether rows share pages. Then the rest of each row is short.
        kept_size: As in `shared_memory`.
        window: How many keys a row sees. None: all.
        drafted: Whether a row has several queries. Measured for four query heads and dim 128.
    """
    config = _measured(rows, group, dim, element_size, shared)
    if element_size == 2 and kept_size in (0, 2) and not shared:
        if dim == 128 and config == ONE_ROW:
            config = replace(config, piece=2)
        elif dim == 128 and rows > 1 and 4 < group <= 8:
            full = FULL_PRODUCTS if rows <= 128 else FULL_PRODUCTS_OF_MANY
            if _fitting_crowd(full.crowd, full.shared_memory(group, dim, 2), launch) == full.crowd:
                config = full  # with fewer programs there would be too few warps
        elif dim == 256 and (rows == 1 or group > 4) and group <= 8:
            config = WIDE_HEADS
        elif dim == 64 and rows <= 2 and window is not None and window <= IN_ONE.block:
            config = IN_ONE
        elif dim == 64 and rows > 64 and 4 < group <= 8:
            config = ONE_WARP
    if drafted and group > 16 and element_size == 2:
        config = MANY_COLUMNS if group > 32 else SEVERAL_COLUMNS if rows <= 16 and dim == 128 else config
    if kept_size and kept_size < element_size == 2 and not (shared and rows > 16):
        config = ONE_WARP if rows > 64 and dim == 128 and group <= 8 else _half_the_bytes(config)
    while (
        need := config.shared_memory(group, dim, element_size, kept_size, launch.warp_groups)
    ) > launch.shared_memory and config.block > 16:
        config = replace(config, block=config.block // 2)
    return replace(config, crowd=_fitting_crowd(config.crowd, need, launch))


def _fitting_crowd(crowd: int, need: int, launch: Launch) -> int:
    """Return how many programs of `need` bytes, at most `crowd`, fit on a processor."""
    # CUDA reserves 1 KB for each program.
    return max(1, min(crowd, (launch.shared_memory + 1024) // (need + 1024)))


def parts_at_once(config: DecodeConfig, columns: int, dim: int, drafted: bool) -> int:
    """Return how many parts of a row are added up in one step. dim: padded. drafted: as in `decode_config`.

    Two parts with more than 8 columns of several queries take longer in one step than in two.
    """
    if drafted and columns > 8:
        return 1
    return max(1, config.merged // (power_of_two(columns) * dim))


def tile_queries(queries: int, group: int, dim: int) -> int:
    """Return how many of a row's queries a program has. dim: padded. The results of a program stay in registers."""
    most = max(1, MOST_RESULTS // max(dim, 128) // group)
    return -(-queries // -(-queries // most))


def _half_the_bytes(config: DecodeConfig) -> DecodeConfig:
    """Return the config for elements of one byte. Longer blocks or more stages keep as many bytes in flight."""
    if config.block < 128:
        # For one row a fourth program on each processor pays off: 29.0 us at 32k instead of 35.0.
        return replace(config, block=2 * config.block, crowd=4 if config == ONE_ROW else config.crowd)
    return replace(config, stages=2 * config.stages - 1)


def _measured(rows: int, group: int, dim: int, element_size: int, shared: bool) -> DecodeConfig:
    if element_size > 2:
        return DecodeConfig(block=32 if dim <= 128 else 16, stages=2, warps=4, crowd=2)
    if dim > 128:
        return DecodeConfig(block=32, stages=3, warps=4, crowd=2)
    if shared and rows > 16:
        return DecodeConfig(block=32, stages=4, warps=2, crowd=4)
    if rows <= 2 and dim <= 64:
        return DecodeConfig(32, stages=3, warps=2, crowd=4) if group <= 4 else ONE_ROW
    if rows == 1 and group > 2:
        return ONE_ROW
    if rows <= 2:
        return DecodeConfig(block=32, stages=3, warps=2, crowd=4, merged=8192)
    if 8 < rows <= 16:
        return DecodeConfig(block=128, stages=3, warps=4, crowd=1, merged=8192)
    if rows > 64 and dim <= 64 and group <= 4:
        return DecodeConfig(block=64, stages=3, warps=2, crowd=4)
    return DecodeConfig(block=32, stages=3, warps=2, crowd=4, merged=8192 if rows <= 8 and group > 4 else 4096)


MOST_HEADS = 32  # heads of a tile of single queries, whose results stay in registers; half of it in float32


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """How attention over latents and attention of chunks divide their work."""

    block: int  # latents or keys of an iteration
    stages: int  # stages of the copy pipeline
    warps: int
    crowd: int = 1  # programs on each processor at once

    def shared_memory(self, queries: int, width: int, values: int, element_size: int, copies: int) -> int:
        """Return the bytes for `copies` blocks, the queries and the weights.

        width: of keys and queries, padded. values: the width of values, 0 if they are a part of keys.
        """
        kept = copies * self.block * (width + values)
        return (kept + queries * (width + self.block)) * element_size + 8 * queries


@lru_cache
def latent_decode_config(
    rows: int, queries: int, width: int, element_size: int, launch: Launch, codes: bool = False
) -> LatentConfig:
    """Return the config of decodes over latents. Measured on an H200 for queries of 2-byte elements.

    queries: heads of a tile, padded. codes: latents are FP8, whose conversion needs more threads.
    """
    config = LatentConfig(block=32, stages=4 if rows <= 8 else 3, warps=4, crowd=1 if rows <= 8 else 2)
    if codes and rows <= 8:
        config = LatentConfig(block=32, stages=3, warps=8)
    if element_size > 2:
        config = LatentConfig(block=16, stages=2, warps=4)
    # Blocks of less than 64 rows are multiplied from registers, so one stage needs no shared memory.
    config, need = _fitting(config, queries, width, 0, element_size, launch, lambda config: config.stages - 1)
    return replace(config, crowd=_fitting_crowd(config.crowd, need, launch))


@lru_cache
def chunk_config(queries: int, width: int, values: int, element_size: int, launch: Launch) -> LatentConfig:
    """Return the config of chunks. queries: rows of a tile; width, values: see `shared_memory`."""
    config = LatentConfig(block=64, stages=2, warps=8) if element_size <= 2 else LatentConfig(16, 2, 4)
    return _fitting(config, queries, width, values, element_size, launch, lambda config: config.stages)[0]


def decode_borders(launch: Launch, most: int) -> list[int]:
    """Return the numbers of rows below `most` after which decodes of some model use another config."""
    shapes = list(itertools.product((1, 4, 8, 16), (64, 128, 256)))  # query heads of a KV head, dim
    kinds = [(False, 2, None), (False, 1, None), (True, 2, None), (True, 1, None), (False, 2, 64)]

    def configs(rows: int) -> list[object]:
        of_heads = [decode_config(rows, *shape, 2, launch, *kind) for shape in shapes for kind in kinds]
        of_latents = [latent_decode_config(rows, 32, 1024, 2, launch, codes) for codes in (False, True)]
        return [*of_heads, *of_latents, merge_spans(rows, 512)]

    return find_borders(configs, most)


def merge_spans(rows: int, rank: int) -> tuple[int, int]:
    """Return how many heads, and columns of each head, a program merges in latent attention.

    A few rows are split into many parts. Most of many rows are in one part. rank: padded.
    """
    return (1, min(128, rank)) if rows <= 16 else (4, rank)


def tile_heads(heads: int, element_size: int) -> int:
    """Return how many heads one tile of single queries has. The tile is padded to a power of two."""
    tiles = -(-heads // (MOST_HEADS if element_size <= 2 else MOST_HEADS // 2))
    return -(-heads // tiles)


def chunk_rows(element_size: int, launch: Launch) -> int:
    """Return the rows of a tile of chunks. All chunks have the same, so they need only one variant.

    The queries are in shared memory.
    """
    return 16 if element_size > 2 else 64 if launch.shared_memory >= 160 * 1024 else 32


def _fitting(
    config: LatentConfig, queries: int, width: int, values: int, element_size: int, launch: Launch,
    copies: Callable[[LatentConfig], int],
) -> tuple[LatentConfig, int]:  # fmt: skip
    """Return a config that fits, with smaller blocks or fewer stages if necessary, and the bytes it needs."""
    while (need := config.shared_memory(queries, width, values, element_size, copies(config))) > launch.shared_memory:
        if config.block > 16:
            config = replace(config, block=config.block // 2)
        elif config.stages > 1:
            config = replace(config, stages=config.stages - 1)
        else:
            break
    return config, need
