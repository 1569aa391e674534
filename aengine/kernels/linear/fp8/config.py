"""How products with FP8 weights are divided among programs, by their shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from aengine.kernels.launch import LIGHT, Launch, find_borders
from aengine.kernels.linear.fp8.few_rows import FEW_ROWS, MAX_ROWS, FewRowsConfig
from aengine.kernels.linear.fp8.few_tiles import FewTilesConfig
from aengine.kernels.linear.fp8.many_rows import ManyRowsConfig
from aengine.kernels.linear.fp8.one_row import OneRowConfig
from aengine.kernels.linear.fp8.quantize import GROUP

LEAST_GROUPS = {2: 32, 3: 60, 4: 80}  # by the pieces of k: with fewer groups, pieces are no faster than our tiles
LEAST_TILED = 2 * FEW_ROWS  # up to this number of rows, a weight is read at the speed of memory without tiles


@lru_cache
def few_rows_config(m: int, n: int, k: int, element_size: int, launch: Launch) -> FewRowsConfig | OneRowConfig | None:
    """Return how to divide a weight [n, k] for m rows of x in its own type; None: round x to FP8.

    With less shared memory, fewer copies are in flight.
    """
    if not 0 < m <= MAX_ROWS:
        return None
    if m == 1:
        return _one_row(n, k, launch.processors)
    config = _few_rows(m, n, k, launch.processors)
    while config.stages > 1 and config.shared_memory(m, element_size) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config if config.shared_memory(m, element_size) <= launch.shared_memory else None


@lru_cache
def rounded_rows_config(m: int, n: int, k: int, launch: Launch) -> FewRowsConfig | None:
    """Return how to divide a weight [n, k] for m rows of x in FP8, with scales for groups of 128 columns."""
    config = _rounded_rows(m, n, k, launch.processors)
    while config.stages > 1 and config.shared_memory(m, 1) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config if config.shared_memory(m, 1) <= launch.shared_memory else None


def _one_row(n: int, k: int, processors: int) -> OneRowConfig:
    groups = -(-k // GROUP)
    width = 16 if groups % 16 == 0 and n <= 16384 else min(8, _power_of_two_within(groups))
    light = n * k < LIGHT
    # Both steps are loaded before the wait, with 4 rows a program. If 4 programs a processor, of 8 rows each, have all
    # rows, the second step is loaded after the wait.
    both = groups == 2 * width == 32 and (light or n > 32 * processors)
    rows = 4 if light or both else 8
    while rows > 2 and n < 2 * rows * processors:
        rows //= 2
    return OneRowConfig(rows, max(1, width // 4), width, ahead=2 if both or groups > 2 * width else 1)


def _rounded_rows(m: int, n: int, k: int, processors: int) -> FewRowsConfig:
    groups, tiles = -(-k // GROUP), -(-n // 64)
    if tiles > 2 * processors:
        return FewRowsConfig(64, 1, 4, 4, min(2, groups)) if m <= 2 * FEW_ROWS else FewRowsConfig(128, 1, 4, 4, 1)
    most = 4 * processors if m <= FEW_ROWS else 3 * processors
    splits = 1
    while tiles * 2 * splits <= most and groups % (2 * splits) == 0 and groups // (2 * splits) >= 4:
        splits *= 2
    if FEW_ROWS < m <= 2 * FEW_ROWS and n < 6144:
        return FewRowsConfig(64, splits, 6, 4, 1)
    # The groups after those of a piece belong to another piece, or do not exist.
    return FewRowsConfig(64, splits, 4, 4, 1 if splits == 8 else min(2, groups // splits))


def _few_rows(m: int, n: int, k: int, processors: int) -> FewRowsConfig:
    groups, tiles = -(-k // GROUP), -(-n // 64)
    splits = 1
    while tiles * splits <= processors and groups % (2 * splits) == 0 and groups // (2 * splits) >= 4:
        splits *= 2
    stages = 6 if m <= FEW_ROWS else 5 if m <= 2 * FEW_ROWS else 4
    return FewRowsConfig(64, splits, stages, 4, 1)


@lru_cache
def many_rows_config(m: int, n: int, launch: Launch) -> ManyRowsConfig:
    """Return how to cut x in FP8 and a weight [n, k] into tiles: large ones, if there are enough for all processors."""
    if _tiles(m, n, 64, 128) >= 4 * launch.processors:
        config = ManyRowsConfig(64, 128, 3, 4)
    elif _tiles(m, n, 64, 128) >= launch.processors:
        config = ManyRowsConfig(64, 128, 6, 4)
    elif _tiles(m, n, 64, 64) >= launch.processors:
        config = ManyRowsConfig(64, 64, 4, 4)
    else:
        config = ManyRowsConfig(64, 32, 8, 4)
    while config.shared_memory() > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config


@lru_cache
def few_tiles_config(m: int, n: int, k: int, launch: Launch) -> FewTilesConfig | None:
    """Return how to cut a product whose tiles in the library are so few that processors idle; None: it has more tiles.

    The costs were measured on an H200 in units of 0.083 us. A group of columns takes 4, or 3 with tiles half as wide.
    Each split of k takes 40.
    """
    groups, cuts = k // GROUP, list[tuple[int, FewTilesConfig]]()
    if m <= LEAST_TILED or k % (2 * GROUP):
        return None
    for block_n, each in ((128, 4), (64, 3)):
        tiles = _tiles(m, n, 64, block_n)
        for splits in range(1, min(launch.processors // tiles, groups // 2) + 1):
            config = FewTilesConfig(64, block_n, splits, 4, 4)
            if groups % (2 * splits) == 0 and config.shared_memory() <= launch.shared_memory:
                cuts.append((each * groups // splits + 40 * (splits - 1), config))
    return min(cuts, key=lambda cut: cut[0])[1] if cuts else None


@lru_cache
def pieces_of_k(m: int, n: int, k: int, launch: Launch) -> int:
    """Return in how many pieces of k the library multiplies tiles of 128 x 128 side by side.

    1 means that it has enough tiles, or that rows are too short to pay for the ends of pieces. Measured on an H200 in
    units of 0.083 us: a group of columns takes 4, each piece about 32.
    """
    if not MAX_ROWS < m <= 256 or n % GROUP or k % GROUP:
        return 1
    groups = k // GROUP
    tiles = -(-_tiles(m, n, 128, 128) // 2) * 2  # two processors share an operand
    fitting = [
        count
        for count, least in LEAST_GROUPS.items()
        if groups >= least and groups % count == 0 and launch.processors // 2 < tiles * count <= launch.processors
    ]
    return min(fitting, key=lambda count: 4 * groups // count + 32 * count, default=1)


def fp8_borders(n: int, k: int, launch: Launch, most: int) -> list[int]:
    """Return the numbers of rows below `most` after which other kernels of ours multiply with a weight [n, k].

    For x in 16 bits and any kind of activations. Whole products of the library need no compiling.
    """
    hopper = launch.capability[0] == 9

    def kernels(m: int) -> tuple[object, ...]:
        few = (few_rows_config(m, n, k, 2, launch), rounded_rows_config(m, n, k, launch)) if m <= MAX_ROWS else ()
        heights = [config.padded(m) for config in few if isinstance(config, FewRowsConfig)]
        pieces = pieces_of_k(m, n, k, launch) if hopper else 1
        return (
            *few,
            *heights,
            pieces,
            few_tiles_config(m, n, k, launch) if hopper else None,
            many_rows_config(m, n, launch),
        )

    return find_borders(kernels, most)


def _tiles(m: int, n: int, block_m: int, block_n: int) -> int:
    return -(-m // block_m) * -(-n // block_n)


def _power_of_two_within(number: int) -> int:
    return 1 << (number.bit_length() - 1)
