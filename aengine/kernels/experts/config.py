"""Which kernels compute a mixture of experts, and how they divide it, by its shape and the number of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from aengine.kernels.experts.few_rows import FewConfig, FewCut
from aengine.kernels.experts.fp8_rows import Fp8ManyConfig
from aengine.kernels.experts.many_rows import ManyConfig, ManyCut
from aengine.kernels.experts.packed.few_rows import PackedFewConfig
from aengine.kernels.experts.packed.rows import PackedConfig, PackedCut
from aengine.kernels.experts.packed.single_rows import PackedSingleConfig, PackedSingleCut
from aengine.kernels.experts.routing.plan import pairs_at_once
from aengine.kernels.experts.routing.route import route_config
from aengine.kernels.experts.routing.route_rows import MAX_TOKENS
from aengine.kernels.experts.single_rows import SingleConfig, SingleCut
from aengine.kernels.launch import Launch, find_borders, power_of_two

HEIGHTS = (16, 32, 64)  # rows of a tile, for few rows
SINGLE_TOKENS = 4  # up to here every pair is computed by itself
FEW_AVERAGE = 32  # rows of an expert on average, up to which reading the weights takes the time
TALL_AVERAGE = 96  # rows of an expert on average, after which tiles are twice as high
PACKED_AVERAGE = 192  # the same of 4-bit codes, after which tiles are four times as high
MXFP4_AVERAGE = 4  # the same of MXFP4, up to which tiles of 8 rows without barriers are faster
GATHERED_AVERAGE = 448  # rows of an expert on average, after which a sorted copy of the rows takes longer than it saves
LARGE_MEMORY = 224 * 1024  # bytes of shared memory that hold a tile being stored and the next ones being loaded
_C = TypeVar("_C", FewConfig, ManyConfig, Fp8ManyConfig, PackedConfig)


@lru_cache
def single_config(tokens: int, top_k: int, hidden: int, element_size: int) -> SingleConfig | None:
    """Return how to compute single rows; None if tiles of rows are faster, or elements have 4 bytes."""
    if tokens > SINGLE_TOKENS or element_size > 2:
        return None
    columns = _columns(2048, hidden)
    return SingleConfig(SingleCut(2, columns, 2048 // columns, columns // 256), _single_down(16, top_k))


def beside_shared(config: SingleConfig, hidden: int) -> SingleConfig:
    """Change a config for an expert that all tokens pass: programs with half as many threads fill the last wave."""
    return config if hidden % 2048 else replace(config, gate_up=SingleCut(2, 1024, 2, 4))


@lru_cache
def tile_config(tokens: int, top_k: int, experts: int, element_size: int, launch: Launch) -> FewConfig | ManyConfig:
    """Return how to compute tiles of rows, for `tokens` tokens of which each goes to `top_k` of `experts`.

    With less shared memory, fewer copies are in flight.
    """
    pairs, height = tokens * top_k, _height(tokens * top_k, experts)
    if element_size > 2:
        cut = FewCut(block_n=16, block_k=32, stages=2, warps=4)
        return _fitting(FewConfig(min(32, height), cut, cut), element_size, launch)
    # Before Hopper, loads through descriptors are not issued early.
    if pairs <= FEW_AVERAGE * experts or not launch.overlap:
        return _fitting(FewConfig(height, FewCut(32, 64, 6, 4), FewCut(64, 64, 6, 4)), element_size, launch)
    if pairs <= TALL_AVERAGE * experts:
        return _fitting(ManyConfig(64, ManyCut(128, 64, 4, 8), ManyCut(128, 64, 4, 4, 2)), element_size, launch)
    gather = pairs > GATHERED_AVERAGE * experts
    # A tile of few columns has few steps, and its end takes as long as they do, unless the next tile's steps begin
    # before.
    flat = launch.shared_memory >= LARGE_MEMORY
    gate_up, down = ManyCut(128, 64, 4, 8, flatten=flat), ManyCut(256, 64, 3, 8, flatten=flat)
    return _fitting(ManyConfig(128, gate_up, down, gather), element_size, launch)


@lru_cache
def fp8_single_config(tokens: int, top_k: int, hidden: int, element_size: int) -> SingleConfig | None:
    """Like `single_config`, for matrices in FP8."""
    if tokens > SINGLE_TOKENS or element_size > 2:
        return None
    columns = _columns(1024, hidden)
    return SingleConfig(SingleCut(8, columns, 2048 // columns, columns // 256), _single_down(24, top_k))


@lru_cache
def fp8_tile_config(
    tokens: int, top_k: int, experts: int, element_size: int, launch: Launch
) -> FewConfig | Fp8ManyConfig:
    """Like `tile_config`, for matrices in FP8 and rows of `element_size` bytes an element."""
    pairs, height = tokens * top_k, _height(tokens * top_k, experts)
    if element_size > 2:
        cut = FewCut(block_n=16, block_k=32, stages=2, warps=4)
        return _fitting(FewConfig(min(32, height), cut, cut), element_size, launch, weight_size=1)
    if not launch.overlap or tokens <= SINGLE_TOKENS:
        return _fitting(
            FewConfig(height, FewCut(32, 128, 5, 4), FewCut(64, 128, 3, 4)), element_size, launch, weight_size=1
        )
    # This holds for few rows too: widening the weights takes longer than reading them.
    crowd = 0 if pairs <= TALL_AVERAGE * experts else 2
    return _fitting(
        Fp8ManyConfig(64, ManyCut(64, 128, 3, 4, crowd), ManyCut(128, 128, 3, 4, 0)), element_size, launch, 1
    )


@lru_cache
def packed_single_config(tokens: int, element_size: int) -> PackedSingleConfig | None:
    """Like `single_config`, for matrices of 4-bit codes."""
    if tokens > SINGLE_TOKENS or element_size > 2:
        return None
    gate_up = PackedSingleCut(16, 4, 6, registers=168) if tokens == 1 else PackedSingleCut(16, 4, 4, registers=128)
    return PackedSingleConfig(gate_up, PackedSingleCut(16, 8, 6, registers=128))


@lru_cache
def mxfp4_few_config(tokens: int, top_k: int, experts: int, launch: Launch) -> PackedFewConfig | None:
    """Return how to compute few rows of MXFP4 in bfloat16; None if other kernels are faster or the GPU is no Hopper.

    On an H200, other kernels against these, us a layer of gpt-oss-120b: 4 tokens 77.5 and 72.2, 64 tokens 464 and 397,
    128 tokens 526 and 461; at 1 token 26.0 and 33.7, at 256 tokens 533 and 679. Warps that share strips gain 7 % at 8
    tokens and lose 7 % at 32.
    """
    pairs = tokens * top_k
    if not launch.warp_groups or tokens < SINGLE_TOKENS or pairs > MXFP4_AVERAGE * experts:
        return None
    return PackedFewConfig(column_warps=4 if pairs <= 64 else 1)


@lru_cache
def packed_tile_config(tokens: int, top_k: int, experts: int, element_size: int, launch: Launch) -> PackedConfig:
    """Like `tile_config`, for matrices of 4-bit codes, of which a step takes 128 columns."""
    pairs, height = tokens * top_k, _height(tokens * top_k, experts)
    if element_size > 2:
        cut = PackedCut(16, 2, 4)
        return _fitting(PackedConfig(min(32, height), cut, cut), element_size, launch)
    if not launch.warp_groups:
        return _fitting(PackedConfig(height, PackedCut(32, 4, 4), PackedCut(64, 4, 4)), element_size, launch)
    # A block is always one product. With four products of 64 rows, sums differed from call to call.
    if height <= 32:
        return PackedConfig(height, PackedCut(64, 4, 4, ahead=True), PackedCut(128, 4, 4, ahead=True))
    if pairs <= PACKED_AVERAGE * experts:
        return PackedConfig(height, PackedCut(64, 3, 4, ahead=True), PackedCut(128, 3, 4, ahead=True))
    return PackedConfig(256, PackedCut(64, 3, 8, ahead=True), PackedCut(128, 3, 8, ahead=True))


def experts_borders(top_k: int, experts: int, hidden: int, launch: Launch, most: int) -> list[int]:
    """Return the numbers of tokens below `most` after which other kernels route tokens or compute experts.

    For matrices in any format and rows of 2 bytes an element.
    """
    tiles = tile_config, fp8_tile_config, packed_tile_config

    def kernels(tokens: int) -> tuple[object, ...]:
        return (
            *(choose(tokens, top_k, hidden, 2) for choose in (single_config, fp8_single_config)),
            packed_single_config(tokens, 2),
            mxfp4_few_config(tokens, top_k, experts, launch),
            *(choose(tokens, top_k, experts, 2, launch) for choose in tiles),
            *(route_config(tokens, experts, hidden, wide, launch) for wide in (False, True)),
            tokens <= MAX_TOKENS,  # norm and router are one launch
            pairs_at_once(tokens * top_k),
        )

    return find_borders(kernels, most)


def _height(pairs: int, experts: int) -> int:
    """Return the rows of a tile, for few pairs of each expert: twice an expert's average."""
    return next((height for height in HEIGHTS if 2 * pairs // experts <= height), HEIGHTS[-1])


def _columns(most: int, hidden: int) -> int:
    """Return the columns of a block, eight for each thread: a divisor of `hidden`, for at least two warps."""
    return next((columns for columns in (2048, 1024) if columns <= most and hidden % columns == 0), 512)


def _single_down(most: int, top_k: int) -> SingleCut:
    """Return a warp for each of a token's experts. most: weights of a thread in flight, in units of 8."""
    width = power_of_two(top_k)
    rows = min(8, width)
    return SingleCut(rows, 256, min(8, max(1, most // max(rows, width))), rows)


def _fitting(config: _C, element_size: int, launch: Launch, weight_size: int | None = None) -> _C:
    """Return the config with fewer copies in flight, if it does not fit otherwise."""
    while config.shared_memory(element_size, weight_size or element_size) > launch.shared_memory - 1024:
        cuts = (config.gate_up, config.down)
        most = max(cut.stages for cut in cuts)
        if most == 1:
            raise ValueError(f"{launch.shared_memory} bytes of shared memory are too few for {config}")
        gate_up, down = (replace(cut, stages=min(cut.stages, most - 1)) for cut in cuts)
        config = replace(config, gate_up=gate_up, down=down)
    return config
