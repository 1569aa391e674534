"""How decode attention cuts its work, by what was measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from aengine.kernels.launch import Launch, find_borders, power_of_two


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """block: keys at a time; stages: depth of the copy pipeline; merged: elements of parts that are added up at a time;
    piece: blocks that a program takes at least; a short row then leaves some programs without any, and has fewer parts
    to be added up.

    crowd: programs on each processor at once. It must be exactly as many as fit: with room for one more, programs of
    the next launch move in early, and then more of them share some processors than others.
    """

    block: int
    stages: int
    warps: int
    crowd: int
    merged: int = 4096
    piece: int = 1

    def shared_memory(
        self, group: int, dim: int, element_size: int, kept_size: int = 0, warp_groups: bool = False
    ) -> int:
        """Bytes: the keys and values that are on their way while a block is attended to, the queries, the weights.

        dim: as it is padded; kept_size: bytes of an element of the cache, 0 where it is `element_size`; warp_groups:
        four warps may multiply as one, and then what is being attended to stays there as well.
        """
        if element_size > 2:  # what is kept in fewer bytes takes as many for a product of float32
            kept_size = 0
        blocks = self.stages if warp_groups and self.warps % 4 == 0 else self.stages - 1
        copies = blocks * 2 * self.block * dim * (kept_size or element_size)
        return copies + group_pad(group) * (dim + self.block) * element_size + 4 * group_pad(group)


# Small programs let the next product's programs move in beside them: best in a whole step, though not alone.
ONE_ROW = DecodeConfig(block=32, stages=3, warps=2, crowd=3, merged=8192)
# Of heads of 256: one row, and where more than four query heads make larger parts.
WIDE_HEADS = DecodeConfig(block=32, stages=2, warps=2, crowd=4, merged=8192)
# A window's keys and one block more: one program has them all, or two.
IN_ONE = DecodeConfig(block=128, stages=2, warps=4, crowd=2)
# A program of one warp never waits for another warp, and eight of them hide each other's ends of rows.
ONE_WARP = DecodeConfig(block=64, stages=2, warps=1, crowd=8)
# The same with five to eight query heads, which fill a product: more on its way for each program, or, where there is
# about a row for each, more programs.
FULL_PRODUCTS = DecodeConfig(block=32, stages=4, warps=1, crowd=4)
FULL_PRODUCTS_OF_MANY = DecodeConfig(block=32, stages=2, warps=1, crowd=8)


def group_pad(group: int) -> int:
    """The width of a matrix product over `group` query heads."""
    return max(8, power_of_two(group))


@lru_cache
def decode_config(
    rows: int, group: int, dim: int, element_size: int, launch: Launch, shared: bool = False, kept_size: int = 0,
    window: int | None = None,
) -> DecodeConfig:  # fmt: skip
    """Measured on an H200 for 2-byte elements, dim 64 to 256 (bench/KERNELS.md); the others only have to fit.

    group: query heads of each KV head; dim: as it is padded; shared: what is left of each row is short; kept_size: as
    `shared_memory`; window: of keys that a row sees. Where there is less shared memory, blocks are smaller, and fewer
    programs are on a processor.
    """
    config = _measured(rows, group, dim, element_size, shared)
    if element_size == 2 and kept_size in (0, 2) and not shared:
        if dim == 128 and config == ONE_ROW:
            config = replace(config, piece=2)
        elif dim == 128 and rows > 1 and 4 < group <= 8:
            full = FULL_PRODUCTS if rows <= 128 else FULL_PRODUCTS_OF_MANY
            if full.crowd * (full.shared_memory(group, dim, 2) + 1024) <= launch.shared_memory + 1024:
                config = full  # with fewer of them there would be too few warps
        elif dim == 256 and (rows == 1 or group > 4) and group <= 8:
            config = WIDE_HEADS
        elif dim == 64 and rows <= 2 and window is not None and window <= IN_ONE.block:
            config = IN_ONE
        elif dim == 64 and rows > 64 and 4 < group <= 8:
            config = ONE_WARP
    if kept_size and kept_size < element_size == 2 and not (shared and rows > 16):
        config = ONE_WARP if rows > 64 and dim == 128 and group <= 8 else _half_the_bytes(config)
    while (
        need := config.shared_memory(group, dim, element_size, kept_size, launch.warp_groups)
    ) > launch.shared_memory and config.block > 16:
        config = replace(config, block=config.block // 2)
    # A program has 1 KB beside its own.
    return replace(config, crowd=max(1, min(config.crowd, (launch.shared_memory + 1024) // (need + 1024))))


def _half_the_bytes(config: DecodeConfig) -> DecodeConfig:
    """For elements of one byte: as many bytes on their way as with two, in longer blocks or in more of them."""
    if config.block < 128:
        # A fourth program on each processor pays for one row: 35.0 to 29.0 us at 32k.
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
def latent_decode_config(
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


def decode_borders(launch: Launch, most: int) -> list[int]:
    """Return the numbers of rows below `most` after which single queries of some model use another config."""
    shapes = list(itertools.product((1, 4, 8, 16), (64, 128, 256)))  # query heads of a KV head, dim
    kinds = [(False, 2, None), (False, 1, None), (True, 2, None), (True, 1, None), (False, 2, 64)]

    def configs(rows: int) -> list[object]:
        of_heads = [decode_config(rows, *shape, 2, launch, *kind) for shape in shapes for kind in kinds]
        of_latents = [latent_decode_config(rows, 32, 1024, 2, launch, codes) for codes in (False, True)]
        return [*of_heads, *of_latents, merge_spans(rows, 512)]

    return find_borders(configs, most)


def merge_spans(rows: int, rank: int) -> tuple[int, int]:
    """Return how many heads, and columns of each, a program adds up when the parts of latent attention are merged.

    A few rows are split into many parts; of many rows most are whole. rank: as it is padded.
    """
    return (1, min(128, rank)) if rows <= 16 else (4, rank)


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
