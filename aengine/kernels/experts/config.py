"""Which kernels a mixture of experts runs on, and how they are cut up, by its shape and the number of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from aengine.kernels.experts.few_rows import FewConfig, FewCut
from aengine.kernels.experts.many_rows import ManyConfig, ManyCut
from aengine.kernels.experts.single_rows import SingleConfig, SingleCut
from aengine.kernels.launch import Launch, power_of_two

SINGLE_TOKENS = 4  # up to which every pair is read for itself
FEW_AVERAGE = 32  # rows of an expert on average, up to which the weights are what takes time
Config = SingleConfig | FewConfig | ManyConfig
_C = TypeVar("_C", FewConfig, ManyConfig)


@lru_cache
def experts_config(
    tokens: int, top_k: int, experts: int, hidden: int, inter: int, element_size: int, launch: Launch
) -> Config:
    """How to compute `experts` of `inter` for so many tokens, of which each goes to top_k of them.

    Where there is less shared memory, fewer copies are on their way at once.
    """
    pairs = tokens * top_k
    height = min(64, max(16, power_of_two(2 * pairs // experts)))
    if element_size > 2:
        cut = FewCut(block_n=16, block_k=32, stages=2, warps=4)
        return _fitting(FewConfig(min(32, height), cut, cut, sum_last=tokens <= 64), element_size, launch)
    if tokens <= SINGLE_TOKENS:
        return SingleConfig(
            gate_up=SingleCut(2, _at_most(2048, hidden), 2, 4),
            down=SingleCut(2, min(8192 // power_of_two(top_k), power_of_two(inter)), 2, 4),
        )
    # Before Hopper, what comes through descriptors is not on its way early.
    if pairs <= FEW_AVERAGE * experts or not launch.overlap:
        return _fitting(
            FewConfig(height, FewCut(32, 64, 6, 4), FewCut(64, 64, 6, 4), sum_last=tokens <= 64), element_size, launch
        )
    if pairs <= 96 * experts:
        return _fitting(ManyConfig(64, ManyCut(64, 64, 4, 4, 2), ManyCut(128, 64, 4, 4, 2)), element_size, launch)
    return _fitting(ManyConfig(128, ManyCut(128, 64, 3, 8), ManyCut(256, 64, 3, 8)), element_size, launch)


def _at_most(most: int, n: int) -> int:
    """The largest power of two within both."""
    return min(most, 1 << (n.bit_length() - 1))


def _fitting(config: _C, element_size: int, launch: Launch) -> _C:
    """The same with fewer copies on their way, where they do not fit otherwise."""
    while config.shared_memory(element_size) > launch.shared_memory - 1024:
        cuts = (config.gate_up, config.down)
        most = max(cut.stages for cut in cuts)
        if most == 1:
            raise ValueError(f"{launch.shared_memory} bytes of shared memory are too few for {config}")
        gate_up, down = (replace(cut, stages=min(cut.stages, most - 1)) for cut in cuts)
        config = replace(config, gate_up=gate_up, down=down)
    return config
