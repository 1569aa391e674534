"""The reference of adapters against merged weights in float64, and against the linear alone without adapters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.base import Linear
from aengine.kernels.lora.base import AdapterWeights, TokenAdapters
from aengine.kernels.lora.torch_adapted import add_all, add_present
from aengine.kernels.torch_kernels import TorchKernels

KERNELS = TorchKernels()
INPUTS, RANK, PLACES = 12, 5, 4
MIXES = [[0, 1, 2, 1, 3, 0], [2], [3, 3, 3], [0, 0], [0, 2, 0, 2]]
PARTS = [(7,), (6, 3, 3), (4, 4)]


def adapters(outputs: tuple[int, ...]) -> AdapterWeights:
    a = torch.randn(PLACES, len(outputs) * RANK, INPUTS)
    b = torch.randn(PLACES, sum(outputs), RANK)
    a[0], b[0] = 0.0, 0.0
    return AdapterWeights(a, b, outputs)


def merged(weight: Tensor, adapters: AdapterWeights, place: int) -> Tensor:
    """Return the merged weight of an adapter, [outputs, inputs] float64."""
    a, b = adapters.a[place].double().split(RANK), adapters.b[place].double().split(adapters.outputs)
    return weight.double() + torch.cat([second @ first for first, second in zip(a, b)])


def each(weight: Tensor, adapters: AdapterWeights, places: list[int], x: Tensor) -> Tensor:
    rows = [merged(weight, adapters, place) @ row for place, row in zip(places, x.double())]
    return torch.stack(rows)


@pytest.mark.parametrize("outputs", PARTS)
@pytest.mark.parametrize("places", MIXES)
def test_each_token_is_multiplied_with_its_own_merged_weight(places: list[int], outputs: tuple[int, ...]) -> None:
    weight, weights, tokens = torch.randn(sum(outputs), INPUTS), adapters(outputs), TokenAdapters()
    linear = KERNELS.adapted(KERNELS.dense(weight, None), weights, tokens)
    tokens.places = torch.tensor(places, dtype=torch.int32)
    x, gate_up = torch.randn(len(places), INPUTS), torch.randn(len(places), 2 * INPUTS)
    residual, norm = torch.randn(len(places), sum(outputs)), KERNELS.norm(torch.randn(INPUTS), 1e-5)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = F.silu(gate) * up
    for got, expected in (
        (linear.apply(x), each(weight, weights, places, x)),
        (linear.apply(x, residual=residual.clone()), residual + each(weight, weights, places, x)),
        (linear.apply(gate_up, gated=True), each(weight, weights, places, inner)),
        (linear.apply(gate_up, gated=True, residual=residual.clone()), residual + each(weight, weights, places, inner)),
        (linear.apply(x, norm=norm), each(weight, weights, places, norm(x))),
    ):
        torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
    assert (linear.inputs, linear.outputs) == (INPUTS, sum(outputs))


@pytest.mark.parametrize("outputs", PARTS)
@pytest.mark.parametrize("places", MIXES)
def test_the_way_without_a_host_sync_gives_the_same(places: list[int], outputs: tuple[int, ...]) -> None:
    weights, of_tokens = adapters(outputs), torch.tensor(places, dtype=torch.int32)
    x, out = torch.randn(len(places), INPUTS), torch.randn(len(places), sum(outputs))
    torch.testing.assert_close(
        add_all(out.clone(), x, weights, of_tokens), add_present(out, x, weights, of_tokens), atol=1e-4, rtol=1e-5
    )


class Recorded:
    """A linear that records its calls."""

    inputs, outputs = INPUTS, 3

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []

    def apply(self, x: Tensor, **given: object) -> Tensor:
        self.calls.append(given)
        return torch.zeros(1, 3)

    def apply_activated(self, x: Tensor, norm: object = None) -> None:
        raise AssertionError("no adapted linear of torch calls it")


def test_without_adapters_only_the_linear_is_called() -> None:
    bare = Recorded()
    broken = AdapterWeights(torch.empty(0), torch.empty(0), (3,))  # computing with it raises
    linear: Linear = KERNELS.adapted(bare, broken, TokenAdapters())
    x, norm = torch.zeros(1, INPUTS), KERNELS.norm(torch.ones(INPUTS), 1e-5)
    expected = [
        {"norm": None, "gated": False, "residual": None},
        {"norm": norm, "gated": False, "residual": None},
        {"norm": None, "gated": True, "residual": x},
    ]
    assert torch.equal(linear.apply(x), torch.zeros(1, 3))
    assert torch.equal(linear.apply(x, norm=norm), torch.zeros(1, 3))
    assert torch.equal(linear.apply(x, gated=True, residual=x), torch.zeros(1, 3))
    assert bare.calls == expected
