"""How products of few rows are cut up, for the shapes of an H200."""

from __future__ import annotations

import pytest

from aengine.kernels.launch import Launch

small_linear = pytest.importorskip("aengine.kernels.linear.small_linear")
LinearConfig, linear_config = small_linear.LinearConfig, small_linear.linear_config
H200 = Launch(processors=132, overlap=True, shared_memory=227 * 1024)


@pytest.mark.parametrize("n", [6144, 37888, 152064])
@pytest.mark.parametrize("k", [1536, 2560, 3584, 4608])
def test_a_single_rows_blocks_end_where_the_columns_do(n: int, k: int) -> None:
    config = linear_config(1, n, k, 2, H200)
    assert (k - config.early) % config.block_k == 0
    assert config.one_row


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (24576, 4096), (151936, 4096), (6144, 1024), (151936, 1024)])
def test_columns_in_whole_thousands_come_early_in_one_block(n: int, k: int) -> None:
    assert linear_config(1, n, k, 2, H200) == LinearConfig(4, 1024, 1, 1, 4, 1024, one_row=True)
