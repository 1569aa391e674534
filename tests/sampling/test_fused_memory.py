"""The scratch memory of a fused draw: a row that verifies drafts draws several times in a step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aengine.sampling.fused import FusedDraw
from aengine.sampling.parameters import RowParameters

CPU = torch.device("cpu")


@pytest.mark.parametrize("filtered", [False, True])
def test_more_draws_than_there_is_memory_for_are_refused(filtered: bool) -> None:
    fused, parameters = FusedDraw(4, CPU), RowParameters(4, 30, CPU)
    rows = torch.arange(5) % 4
    with pytest.raises(ValueError, match="5 draws in a call, but there is memory for 4"):
        fused(torch.zeros(5, 30), parameters, rows, rows, filtered)
    with pytest.raises(ValueError, match="5 draws in a call, but there is memory for 4"):
        fused.candidates(torch.zeros(5, 30), parameters, rows, rows, 0, 30)
