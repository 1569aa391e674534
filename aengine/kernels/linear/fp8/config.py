"""How products with FP8 weights are cut up, by their shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from aengine.kernels.launch import Launch
from aengine.kernels.linear.fp8.few_rows import FEW_ROWS, MAX_ROWS, FewRowsConfig
from aengine.kernels.linear.fp8.many_rows import ManyRowsConfig
from aengine.kernels.linear.fp8.quantize import GROUP


@lru_cache
def few_rows_config(m: int, n: int, k: int, element_size: int, launch: Launch) -> FewRowsConfig | None:
    """How to cut a weight [n, k] for m rows of x in its own type; None: x in FP8, as for many rows.

    Where there is less shared memory, fewer copies are on their way at once.
    """
    if not 0 < m <= MAX_ROWS:
        return None
    config = _one_row(n, k) if m == 1 else _few_rows(m, n, k, launch.processors)
    while config.stages > 1 and config.shared_memory(m, element_size) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config if config.shared_memory(m, element_size) <= launch.shared_memory else None


@lru_cache
def rounded_rows_config(m: int, n: int, k: int, launch: Launch) -> FewRowsConfig | None:
    """The same for rows of x that are in FP8 themselves, with scales for groups of 128 columns."""
    config = _rounded_rows(m, n, k, launch.processors)
    while config.stages > 1 and config.shared_memory(m, 1) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config if config.shared_memory(m, 1) <= launch.shared_memory else None


def _one_row(n: int, k: int) -> FewRowsConfig:
    width = min(8, _power_of_two_within(-(-k // GROUP)))
    if n > 16384:
        return FewRowsConfig(8, 1, 4, 2, min(2, width), min(2, width), one_row=True)
    if n >= 6144 or k >= 8192:
        return FewRowsConfig(8, 1, 3, 2, min(4, width), min(4, width), one_row=True)
    return FewRowsConfig(8, 1, 2, 4, width, width, one_row=True)


def _rounded_rows(m: int, n: int, k: int, processors: int) -> FewRowsConfig:
    groups, tiles = -(-k // GROUP), -(-n // 64)
    if tiles > 2 * processors:
        return FewRowsConfig(64, 1, 4, 4, 2) if m <= 2 * FEW_ROWS else FewRowsConfig(128, 1, 4, 4, 1)
    most = 4 * processors if m <= FEW_ROWS else 3 * processors
    splits = 1
    while tiles * 2 * splits <= most and groups % (2 * splits) == 0 and groups // (2 * splits) >= 4:
        splits *= 2
    if FEW_ROWS < m <= 2 * FEW_ROWS and n < 6144:
        return FewRowsConfig(64, splits, 6, 4, 1)
    return FewRowsConfig(64, splits, 4, 4, 1 if splits == 8 else 2)


def _few_rows(m: int, n: int, k: int, processors: int) -> FewRowsConfig:
    groups, tiles = -(-k // GROUP), -(-n // 64)
    splits = 1
    while tiles * splits <= processors and groups % (2 * splits) == 0 and groups // (2 * splits) >= 4:
        splits *= 2
    stages = 6 if m <= FEW_ROWS else 5 if m <= 2 * FEW_ROWS else 4
    return FewRowsConfig(64, splits, stages, 4, 1)


@lru_cache
def many_rows_config(m: int, n: int, launch: Launch) -> ManyRowsConfig:
    """How to cut x in FP8 and a weight [n, k] into tiles: where there are enough for all processors, large ones."""

    def tiles(block_m: int, block_n: int) -> int:
        return -(-m // block_m) * -(-n // block_n)

    if tiles(64, 128) >= 4 * launch.processors:
        config = ManyRowsConfig(64, 128, 3, 4)
    elif tiles(64, 128) >= launch.processors:
        config = ManyRowsConfig(64, 128, 6, 4)
    elif tiles(64, 64) >= launch.processors:
        config = ManyRowsConfig(64, 64, 4, 4)
    else:
        config = ManyRowsConfig(64, 32, 8, 4)
    while config.shared_memory() > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config


def _power_of_two_within(number: int) -> int:
    return 1 << (number.bit_length() - 1)
