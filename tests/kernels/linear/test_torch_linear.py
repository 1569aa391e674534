"""Packed matrices give the results of plain ones, for every number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aengine.kernels.linear import torch_linear as module
from aengine.kernels.linear.torch_linear import pack, packed_linear, padded_rows

needs_onednn = pytest.mark.skipif(not module.AVAILABLE, reason="this torch was built without oneDNN")


@pytest.fixture
def _packed_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST", 0)


@needs_onednn
@pytest.mark.usefixtures("_packed_whatever_its_size")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 17, 33, 70])
def test_equals_the_plain_product(rows: int, biased: bool) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(40, 24), torch.randn(40) if biased else None
    packed = pack(weight)
    assert packed.is_mkldnn
    torch.testing.assert_close(packed_linear(x, packed, bias), F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("_packed_whatever_its_size")
def test_rows_may_have_gaps_between_them() -> None:
    x, weight = torch.randn(6, 3, 24)[:, 1], torch.randn(40, 24)
    torch.testing.assert_close(packed_linear(x, pack(weight), None), F.linear(x, weight), atol=1e-5, rtol=1e-5)


@needs_onednn
def test_a_small_matrix_stays_plain_and_a_large_one_does_not() -> None:
    small, large = torch.randn(1023, 1024), torch.randn(1024, 1024)
    assert pack(small) is small
    assert pack(large).is_mkldnn


@pytest.mark.usefixtures("_packed_whatever_its_size")
def test_other_dtypes_and_missing_operators_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.randn(4, 8, dtype=torch.bfloat16)
    assert pack(half) is half
    monkeypatch.setattr(module, "AVAILABLE", False)
    full = torch.randn(4, 8)
    assert pack(full) is full


def test_numbers_of_rows_are_few_and_close() -> None:
    sizes = {padded_rows(rows) for rows in range(1, 513)}
    assert sizes >= set(range(1, 9))
    assert len(sizes) == 32
    for rows in range(1, 5000):
        assert rows <= padded_rows(rows) < rows * 1.25
        assert padded_rows(padded_rows(rows)) == padded_rows(rows)
