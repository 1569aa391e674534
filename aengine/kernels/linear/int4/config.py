"""How products with 4-bit weights are divided among programs and warps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aengine.kernels.launch import LIGHT, Launch, find_borders, power_of_two
from aengine.kernels.linear.int4.packed_codes import BLOCK, PackedCodes

LEAST_ROWS = 8  # the least height of a matrix product here
ONE_ROW_WARPS = 8
MOST_STEPS = 32  # blocks of a warp in `StreamedRowConfig`: more take long to compile and were not measured
# From this number of rows on, the library's product is fast enough to pay for writing the weight out first.
DENSE_ROWS = 1024
# From this number of rows on, a dense copy is faster than codes, if one is kept.
COPY_ROWS = 128


@dataclass(frozen=True, slots=True)
class Int4Config:
    """How one shape is divided.

    Args:
        rows: rows of x of a program, a power of two.
        splits: pieces of K, in whole blocks of 128 columns.
        early: steps of each piece that are loaded before the wait, 0 to 2.
        scaled: scales are applied to the weights, not to the sums of a group.
        block_per_warp: use `int4_few_rows_kernel`, for at most `rows` rows, unsplit and with one early step.
        unpacks_ahead: use `int4_many_rows_kernel`. Tiles that fill whole `rounds` of the processors are not split.
    """

    block_n: int
    rows: int
    splits: int
    stages: int
    warps: int
    early: int
    scaled: bool = False
    block_per_warp: bool = False
    unpacks_ahead: bool = False
    rounds: int = 0

    @property
    def step(self) -> int:
        """Blocks of one step."""
        return self.warps if self.block_per_warp else 1

    def shared_memory(self, element_size: int) -> int:
        """Return an upper bound in bytes: words, x and scales in flight, or the sums as they are transposed."""
        words, x = self.block_n * BLOCK // 2, self.rows * BLOCK * element_size
        step = self.step * (words + x + 16 * self.block_n)
        return max(self.stages * step, 4 * (self.rows + 4) * self.block_n * self.step)


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    """How one shape is divided for a single row whose weights are all in flight at once. steps: blocks of a warp."""

    block_n: int
    warps: int
    steps: int


@dataclass(frozen=True, slots=True)
class StreamedRowConfig:
    """How one shape is divided for a single row that is streamed.

    ahead: blocks of a warp in flight. registers: of a thread at most.
    """

    warps: int
    ahead: int
    registers: int

    def steps(self, blocks: int) -> int:
        """Return the blocks of one warp, for a row of the weight of `blocks` blocks."""
        return -(-blocks // self.warps)

    def padded_steps(self, blocks: int) -> int:
        """Return `steps` padded to a power of two, as shared memory is laid out."""
        return power_of_two(self.steps(blocks))

    def shared_memory(self, blocks: int) -> int:
        """Return the bytes: for each block the columns of x, and 8 bytes of scales and offsets for each of 16 rows."""
        return self.padded_steps(blocks) * self.warps * (2 * BLOCK + 128)


def one_row_config(weight: PackedCodes, launch: Launch) -> OneRowConfig | StreamedRowConfig | None:
    """Return how to divide a weight for one row of x in 16 bits; None if `int4_config` is better.

    Measured on an H200, in the four shapes of an 8B model.
    """
    if (weight.group < BLOCK and not weight.nvfp4) or weight.columns % 2:
        return None
    each, tiles = -(-weight.blocks // ONE_ROW_WARPS), -(-weight.rows // 16)
    if tiles < launch.processors:
        return None
    if not weight.nvfp4:
        if tiles <= 2 * launch.processors and each <= 4:
            return OneRowConfig(16, ONE_ROW_WARPS, power_of_two(each))
        if tiles <= 4 * launch.processors and each <= 2:
            return OneRowConfig(32, ONE_ROW_WARPS, each)
    if launch.capability < (8, 0):
        return None
    if tiles <= 2 * launch.processors:
        config = StreamedRowConfig(8, 2 if weight.nvfp4 else 5, 128)
    elif tiles <= 4 * launch.processors:
        config = StreamedRowConfig(4, 4, 160)
    else:
        config = StreamedRowConfig(4, 2, 80)
    if weight.nvfp4:
        config = replace(config, ahead=min(config.ahead, config.steps(weight.blocks)))
    # At least two programs fit a processor, with their blocks in flight. The steps are unrolled.
    fits = config.shared_memory(weight.blocks) <= launch.shared_memory // 2
    return config if fits and config.ahead <= config.steps(weight.blocks) <= MOST_STEPS else None


def int4_config(m: int, n: int, blocks: int, element_size: int, launch: Launch, *, nvfp4: bool = False) -> Int4Config:
    """Return how to divide a weight [n, blocks * 128] for m rows, with fewer stages if there is less shared memory.

    Measured on an H200, in the four shapes of an 8B model.
    """
    # Only Hopper's tensor cores multiply asynchronously, and only 16-bit numbers.
    config = _chosen(m, n, blocks, launch.processors, launch.capability[0] == 9 and element_size == 2, nvfp4)
    while config.stages > 1 and config.shared_memory(element_size) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    while config.rows > LEAST_ROWS and config.shared_memory(element_size) > launch.shared_memory:
        config = replace(config, rows=config.rows // 2)
    return config


def int4_borders(n: int, k: int, launch: Launch, most: int) -> list[int]:
    """Return the numbers of rows below `most` after which another kernel multiplies with a weight [n, k].

    For x in 16 bits. A kernel is compiled for split or unsplit K, not for the number of pieces.
    """

    def kernel(m: int) -> tuple[object, ...]:
        if m >= DENSE_ROWS:
            return ()
        config = int4_config(m, n, -(-k // BLOCK), 2, launch)
        return m == 1, replace(config, splits=min(config.splits, 2), rounds=0)

    return find_borders(kernel, most)


def _chosen(m: int, n: int, blocks: int, processors: int, asynchronous: bool, nvfp4: bool) -> Int4Config:
    if m <= 8 or (m <= 16 and n * blocks * BLOCK // 2 <= LIGHT):
        return _few_rows(max(LEAST_ROWS, power_of_two(m)), n, blocks, processors, nvfp4)
    if m <= 64:
        return _some_rows(max(32, power_of_two(m)), n, blocks, processors, asynchronous)
    if asynchronous:
        return _many_rows(m, n, blocks, processors)
    return _many_rows_in_step(m, n, blocks, processors)


def _few_rows(rows: int, n: int, blocks: int, processors: int, nvfp4: bool) -> Int4Config:
    """Load everything at once: either all programs are resident, or each warp has its own blocks."""
    tiles = -(-n // 64)
    if tiles >= 2 * processors and blocks >= 8:
        if nvfp4:
            return Int4Config(64, rows, 2, 6, 2, 2)  # 11 % faster
        return Int4Config(64, rows, 1, 3, 4, 1, block_per_warp=True)
    splits = max(1, min(8 * processors // tiles, blocks // 4))
    return Int4Config(64, rows, splits, 4, 2, min(2, blocks // splits))


def _some_rows(rows: int, n: int, blocks: int, processors: int, asynchronous: bool) -> Int4Config:
    if -(-n // 128) >= processors:
        if rows <= 32:
            return Int4Config(128, rows, 2 if blocks >= 8 else 1, 4, 4, 0, scaled=True)
        return Int4Config(64 if asynchronous else 128, rows, 1, 3, 4, 0, scaled=True, unpacks_ahead=asynchronous)
    tiles = -(-n // 64)
    splits = max(1, min(3 * processors // tiles, blocks // 4, 6 if rows <= 32 else 4))
    if rows <= 32:
        return Int4Config(64, rows, splits, 6, 4, 0, scaled=True)
    if tiles * splits <= 2 * processors:
        return Int4Config(64, rows, splits, 4, 4, 0, scaled=True, unpacks_ahead=asynchronous)
    return Int4Config(64, rows, splits, 3, 4, 0, scaled=True)


def _many_rows(m: int, n: int, blocks: int, processors: int) -> Int4Config:
    """One program a processor with four stages. Larger tiles leave no registers for the next block's weights."""
    tiles = -(-n // 128) * -(-m // 128)
    rounds, left = divmod(tiles, processors)
    splits = max(1, min(processors // left, blocks // 4, 8)) if left else 1
    return Int4Config(128, 128, splits, 4, 8, 0, scaled=True, unpacks_ahead=True, rounds=rounds)


def _many_rows_in_step(m: int, n: int, blocks: int, processors: int) -> Int4Config:
    """Products wait for one another here. Use whole tiles if they fill the last round, else smaller tiles in pieces of
    K.
    """
    # A large tile reads x less often.
    large, small = (_filled(-(-n // height) * -(-m // 128), processors) for height in (256, 128))
    if max(1.2 * large, small) >= 0.7:
        return Int4Config(256 if 1.2 * large >= small else 128, 128, 1, 3, 8, 0, scaled=True)
    tiles = -(-n // 128) * -(-m // 64)
    return Int4Config(128, 64, max(1, min(2 * processors // tiles, blocks // 4)), 3, 4, 0, scaled=True)


def _filled(tiles: int, processors: int) -> float:
    """Return the share of the processors that have work, if each takes one tile after the other."""
    return tiles / (-(-tiles // processors) * processors)
