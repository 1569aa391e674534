"""Sums of one half of the tokens beside the product of the other half."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from aengine.kernels.collective.config import OVERLAPPED_ROWS
from aengine.kernels.collective.peers import begin_anew
from tests.kernels.collective.test_peers import Ranks
from tests.kernels.conftest import relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [OVERLAPPED_ROWS - 1, OVERLAPPED_ROWS, OVERLAPPED_ROWS + 77])
def test_products_of_many_rows_are_added_up_on_top_of_the_residual(rows: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ranks = Ranks(2)
    x, weight = ranks.tensors(rows, 512, dtype=torch.bfloat16), ranks.tensors(1024, 512, dtype=torch.bfloat16)
    residual = torch.randn(rows, 1024).bfloat16()
    residuals = ranks.copies(residual)
    expected = residual.double() + sum(
        (one.cpu().double() @ two.cpu().double().T for one, two in zip(x, weight)), torch.zeros(())
    )
    for patience in (0.0, 10.0):  # a kernel that is used for the first time waits for its device
        begin_anew(ranks.collectives, patience)
        for own, first in zip(residuals, ranks.copies(residual)):
            own.copy_(first)
        ranks.wait()
        results = []
        for rank, stream in zip(ranks.collectives, ranks.streams):
            with torch.cuda.stream(stream):
                own = weight[rank.index]
                results.append(rank.sum_product(partial(F.linear, weight=own), x[rank.index], residuals[rank.index]))
        ranks.wait()
    assert not any(bool(rank.failed.item()) for rank in ranks.collectives)
    for result in results:
        assert relative_error(result.cpu(), expected) < 0.01
        assert result.cpu().equal(results[0].cpu())
