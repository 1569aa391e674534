from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aengine.kernels.launch import Launch
from aengine.kernels.linear.fp8.config import few_rows_config, many_rows_config

H200, SMALL = Launch(132, True, 227 * 1024), Launch(128, False, 99 * 1024)
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (1024, 3072),
    (128, 16),
    (96, 400),
    (151936, 1024),
    (512, 1152),
]


@pytest.mark.parametrize("launch", [H200, SMALL], ids=["H200", "small"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_cut_divides_the_groups_and_fits(n: int, k: int, launch: Launch) -> None:
    groups = -(-k // 128)
    for m in range(1, 65):
        config = few_rows_config(m, n, k, 2, launch)
        assert config is not None
        assert groups % config.splits == 0
        assert 0 <= config.early <= groups // config.splits
        assert config.one_row == (m == 1)
        assert config.one_row or config.early <= 2
        assert config.shared_memory(m, 2) <= launch.shared_memory
    for m in (1, 65, 256, 8192, 16384):
        assert many_rows_config(m, n, launch).shared_memory() <= launch.shared_memory
    assert few_rows_config(65, n, k, 2, launch) is None
    assert few_rows_config(0, n, k, 2, launch) is None


def test_few_tiles_are_split_along_k_and_many_are_not() -> None:
    assert {few_rows_config(16, n, k, 2, H200).splits for n, k in SHAPES[:2]} == {2, 4}  # type: ignore[union-attr]
    assert few_rows_config(16, 24576, 4096, 2, H200).splits == 1  # type: ignore[union-attr]
    assert many_rows_config(8192, 24576, H200).block_n > many_rows_config(128, 4096, H200).block_n
