"""How products of few rows are cut up, for the shapes of an H200."""

from __future__ import annotations

import pytest

from aengine.kernels.launch import Launch

small_linear = pytest.importorskip("aengine.kernels.linear.small_linear")
linear_config = small_linear.linear_config
H200 = Launch(processors=132, overlap=True, shared_memory=227 * 1024)


@pytest.mark.parametrize("n", [6144, 37888, 152064])
@pytest.mark.parametrize("k", [1536, 2560, 3584, 4096])
def test_a_single_rows_blocks_end_where_the_columns_do(n: int, k: int) -> None:
    config = linear_config(1, n, k, 2, H200)
    assert k % config.block_k == 0
    assert config.early == k  # all of a row is asked for at once


@pytest.mark.parametrize(("n", "k"), [(3072, 4096), (5120, 5120)])
def test_rows_that_are_normed_are_asked_for_at_once_more_often(n: int, k: int) -> None:
    assert linear_config(1, n, k, 2, H200, normed=True).early == k
    assert linear_config(1, n, k, 2, H200).early < k
