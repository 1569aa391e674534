"""After which numbers of rows the kernels of products with 4-bit weights change."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from aengine.kernels.launch import Launch
from aengine.kernels.linear.int4.config import DENSE_ROWS, int4_borders, int4_config

GPUS = {
    "A100": Launch(108, False, 163 * 1024, (8, 0)),
    "RTX 4090": Launch(128, False, 99 * 1024, (8, 9)),
    "H200": Launch(132, True, 227 * 1024, (9, 0)),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (24576, 4096), (1024, 3072), (4608, 3584), (40, 200)])
def test_kernels_change_after_a_border_only(n: int, k: int, nvfp4: bool, gpu: str) -> None:
    """One row may have its own kernel, and the library multiplies many rows."""

    def kernel(m: int) -> object:
        config = int4_config(m, n, -(-k // 128), 2, GPUS[gpu], nvfp4=nvfp4)
        return replace(config, splits=config.splits > 1, rounds=0)

    changes = {m for m in range(1, DENSE_ROWS - 1) if kernel(m) != kernel(m + 1)}
    assert int4_borders(n, k, GPUS[gpu], 8192) == sorted({1, DENSE_ROWS - 1, *changes})
    assert int4_borders(n, k, GPUS[gpu], 16) == sorted(m for m in {1, *changes} if m < 16)
