"""How products of few rows are divided, for the shapes of an H200."""

from __future__ import annotations

import pytest

from aengine.kernels.launch import Launch

small_linear = pytest.importorskip("aengine.kernels.linear.small_linear")
linear_config = small_linear.linear_config
H200 = Launch(processors=132, overlap=True, shared_memory=227 * 1024)


@pytest.mark.parametrize("n", [6144, 37888, 152064])
@pytest.mark.parametrize("k", [1536, 2560, 3584, 4096])
def test_the_blocks_of_a_single_row_divide_its_columns(n: int, k: int) -> None:
    config = linear_config(1, n, k, 2, H200)
    assert k % config.block_k == 0
    assert config.early == k  # all of a row is in flight at once


@pytest.mark.parametrize("processors", [132, 48])
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 12288), (24576, 4096), (151936, 1024), (1024, 512), (40, 200)]
)
def test_kernels_change_after_a_border_only(n: int, k: int, processors: int) -> None:
    launch = Launch(processors, True, 227 * 1024)

    def kernel(m: int) -> object:
        config = linear_config(m, n, k, 2, launch)
        return config, config.padded(m) if isinstance(config, small_linear.LinearConfig) else None

    changes = [m for m in range(1, 200) if kernel(m) != kernel(m + 1)]
    assert small_linear.dense_borders(n, k, launch, 8192) == changes
    assert set(changes) <= {1, *small_linear.ROW_BORDERS}


@pytest.mark.parametrize(("n", "k"), [(3072, 4096), (5120, 5120)])
def test_normed_rows_are_loaded_at_once_more_often(n: int, k: int) -> None:
    assert linear_config(1, n, k, 2, H200, normed=True).early == k
    assert linear_config(1, n, k, 2, H200).early < k
