"""How the kernels of delta nets are cut up, by shape."""

from __future__ import annotations

import math
from functools import lru_cache

from aengine.kernels.delta.across import AcrossConfig
from aengine.kernels.delta.base import BLOCK, DeltaHeads
from aengine.kernels.delta.convolve import ConvolveConfig
from aengine.kernels.delta.decode import DecodeConfig
from aengine.kernels.launch import Launch, power_of_two


@lru_cache
def decode_config(heads: DeltaHeads, state_size: int) -> DecodeConfig:
    """128 numbers of the state a thread. state_size: bytes of one."""
    numbers = power_of_two(heads.key_dim) * power_of_two(heads.value_dim)
    return DecodeConfig(max(1, numbers // (128 * 32)), through_memory=state_size == 2)


@lru_cache
def convolve_config(heads: DeltaHeads, width: int, blocks: int, launch: Launch) -> ConvolveConfig:
    """Some heads a program, token by token, 8 channels a thread; of few blocks a quarter of one.

    width: of the convolution; blocks: of all chunks.
    """
    if width != 4:
        return ConvolveConfig(0, 32, 4, registers=96)
    each = math.gcd(heads.key_heads, heads.value_heads, 8)
    programs = blocks * (2 * heads.key_heads + heads.value_heads) // each
    tokens = BLOCK if programs >= 8 * launch.processors else BLOCK // 4
    return ConvolveConfig(each, tokens, max(1, each * power_of_two(max(heads.key_dim, heads.value_dim)) // 256))


@lru_cache
def across_config(heads: DeltaHeads, element_size: int, launch: Launch) -> AcrossConfig:
    """Where there is less shared memory, fewer blocks are on their way at a time."""
    block_v = min(64, max(16, power_of_two(heads.value_dim)))
    keys = power_of_two(heads.key_dim)
    block = BLOCK * (2 * keys + block_v + 2 * BLOCK) * element_size
    own = (keys + BLOCK) * block_v * element_size
    stages = max((n for n in (1, 2, 3) if n * block + own <= launch.shared_memory), default=1)
    return AcrossConfig(block_v, 4, stages)
