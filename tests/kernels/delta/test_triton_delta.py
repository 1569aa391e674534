"""The kernels of delta nets against float64 token by token: every shape, every way through a step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aengine.kernels.delta.base import DeltaHeads
from aengine.kernels.delta.triton_delta import TritonDelta
from tests.kernels.delta.reference import Entry, World

pytestmark = pytest.mark.gpu

HEADS = [
    pytest.param(DeltaHeads(1, 2, 16, 16), id="tiny"),
    pytest.param(DeltaHeads(2, 2, 24, 40), id="tiny-uneven"),
    pytest.param(DeltaHeads(16, 32, 128, 128), id="9b"),
]


def exactness(*dtypes: torch.dtype) -> float:
    return 5e-6 if all(dtype == torch.float32 for dtype in dtypes) else 2e-2


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kept", ["float32", "half"])
def test_tokens_one_by_one(heads: DeltaHeads, kept: str, dtype: torch.dtype, device: torch.device) -> None:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    states = torch.float32 if kept == "float32" else half
    it = World(heads, [7, 3], dtype, device, kept=states)
    net = TritonDelta(it.weights)
    for t in range(7):
        second = [Entry(1, 1, slot=4, source=4 if t else 0, at=t)] if t < 3 else []
        padding = [Entry(-1, 1, 0, 0)]
        _, errors = it.run(net, [Entry(0, 1, slot=3, source=3 if t else 0, at=t), *padding, *second])
        assert max(errors) < exactness(dtype, states)
    assert it.state.recurrence[0].isnan().all()
    assert it.state.conv[0].isnan().all()
