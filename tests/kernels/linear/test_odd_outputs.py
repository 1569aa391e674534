"""Products of many rows whose outputs end within a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from aengine.kernels.linear import triton_linear
from aengine.kernels.linear.small_linear import SmallLinear
from aengine.kernels.linear.triton_linear import TritonLinear


@pytest.mark.parametrize("outputs", [6, 8, 9])
@pytest.mark.parametrize("rows", [2, 3])
def test_the_last_outputs_are_a_product_of_their_own(outputs: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TILE": 4, "MANY_OUTPUTS": 4, "MANY_ROWS": 3}.items():
        monkeypatch.setattr(triton_linear, name, value)
    monkeypatch.setattr(triton_linear, "linear_config", lambda *_: None)  # no kernel for few rows
    products: list[int] = []
    mm = torch.mm

    def counted(x: torch.Tensor, weight: torch.Tensor, **named: Any) -> torch.Tensor:
        products.append(weight.shape[1])
        return mm(x, weight, **named)

    monkeypatch.setattr(torch, "mm", counted)
    x, weight = torch.randn(rows, 5), torch.randn(outputs, 5)
    out = TritonLinear(weight, None, SmallLinear()).apply(x)
    torch.testing.assert_close(out, F.linear(x, weight))
    assert out.is_contiguous()
    assert products == ([outputs // 4 * 4, outputs % 4] if rows == 3 and outputs % 4 else [])
