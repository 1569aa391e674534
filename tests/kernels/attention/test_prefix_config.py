"""Configs of shared runs are as measured, or smaller if a program has less memory."""

from __future__ import annotations

import pytest

prefix_attention = pytest.importorskip("aengine.kernels.attention.prefix_attention")
KB = 1024


@pytest.mark.parametrize("dim", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("queries", [4, 64, 1024])
@pytest.mark.parametrize("size", [2, 4])
def test_every_config_fits(size: int, queries: int, dim: int) -> None:
    for room in (227 * KB, 163 * KB, 97 * KB):
        config = prefix_attention.prefix_config(queries, dim, size, room)
        assert config.shared_memory(dim, size) <= room
        assert min(config.block_m, config.block) >= 16


def test_measured_configs_are_used_if_they_fit() -> None:
    large = prefix_attention.prefix_config(1024, 128, 2, 227 * KB)
    assert (large.block_m, large.block) == (128, 64)
    assert prefix_attention.prefix_config(1024, 128, 2, 97 * KB) == large
    wide = prefix_attention.prefix_config(1024, 512, 2, 227 * KB)
    assert (wide.block_m, wide.block) == (64, 32)
    assert prefix_attention.prefix_config(1024, 512, 2, 97 * KB).block_m == 32
