"""Experts with the adapters of their tokens: the Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import relative_error, tolerance

pytest.importorskip("triton")

from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.lora.base import AdapterWeights, TokenAdapters
from aengine.kernels.lora.experts import ExpertAdapters, TorchAdaptedExperts
from aengine.kernels.lora.triton_experts import TritonAdaptedExperts
from aengine.kernels.torch_kernels import TorchKernels
from aengine.kernels.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

EXPERTS, PLACES, TOP_K = 6, 4, 2


class Case:
    """A layer of experts with adapters, on the device, and the same in float64 on the CPU."""

    def __init__(
        self, hidden: int, inter: int, rank: int, dtype: torch.dtype, device: torch.device, rule: ExpertRule = SILU
    ) -> None:
        generator = torch.Generator().manual_seed(hidden + rank)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        def adapters(k: int, outputs: tuple[int, ...]) -> list[AdapterWeights]:
            made = []
            for _ in range(EXPERTS):
                a = random(PLACES, len(outputs) * rank, k, scale=k**-0.5)
                b = random(PLACES, sum(outputs), rank, scale=rank**-0.5)
                a[0], b[0] = float("nan"), float("nan")  # never read
                made.append(AdapterWeights(a, b, outputs))
            return made

        def moved(weights: list[AdapterWeights], *where: object) -> list[AdapterWeights]:
            return [AdapterWeights(one.a.to(*where), one.b.to(*where), one.outputs) for one in weights]  # type: ignore[call-overload]

        gate_up = random(EXPERTS, 2 * inter, hidden, scale=hidden**-0.5)
        down = random(EXPERTS, hidden, inter, scale=inter**-0.5)
        first, second = adapters(hidden, (inter, inter)), adapters(inter, (hidden,))
        self.random, self.device, self.tokens, self.wide_tokens = random, device, TokenAdapters(), TokenAdapters()
        self.experts = TritonKernels().adapted_experts(
            TritonKernels().experts(gate_up.to(device), down.to(device), rule),
            ExpertAdapters(moved(first, device), moved(second, device)),
            self.tokens,
        )
        self.wide = TorchAdaptedExperts(
            TorchKernels().experts(gate_up.double(), down.double(), rule),
            ExpertAdapters(moved(first, torch.float64), moved(second, torch.float64)),
            self.wide_tokens,
        )

    def run(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, places: Tensor | None) -> Tensor:
        self.tokens.places = None if places is None else places.to(self.device)
        there = None if residual is None else residual.to(self.device).clone()
        return self.experts.add_to(h.to(self.device), ids.to(self.device), weights.to(self.device), there)

    def expected(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, places: Tensor) -> Tensor:
        self.wide_tokens.places = places
        return self.wide.add_to(h.double(), ids, weights.double(), None if residual is None else residual.double())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: what lies behind the last row is undefined
@pytest.mark.parametrize("rank", [8, 20])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_every_pair_gets_its_tokens_adapter_in_its_expert_tiny(
    tokens: int, residual: bool, rank: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(96, 48, rank, dtype, device)
    generator = torch.Generator().manual_seed(tokens)
    h, onto = case.random(tokens, 96), case.random(tokens, 96) if residual else None
    ids = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:TOP_K] for _ in range(tokens)]).int() - 1
    weights = torch.rand(tokens, TOP_K, generator=generator)
    places = torch.randint(0, PLACES, (tokens,), generator=generator, dtype=torch.int32)
    places[0] = 2
    out = case.run(h, ids, weights, onto, places)
    error = relative_error(out.cpu(), case.expected(h, ids, weights, onto, places))
    assert error < 2 * tolerance(dtype)  # one product behind another


def test_gelu_instead_of_silu_tiny(device: torch.device) -> None:
    case = Case(96, 48, 8, torch.float32, device, ExpertRule(gelu=True))
    h, ids, weights = case.random(3, 96), torch.tensor([[0, 1], [2, 3], [5, 4]], dtype=torch.int32), torch.ones(3, 2)
    places = torch.tensor([1, 0, 3], dtype=torch.int32)
    out = case.run(h, ids, weights, None, places)
    assert relative_error(out.cpu(), case.expected(h, ids, weights, None, places)) < 2 * tolerance(torch.float32)


def test_without_adapters_the_experts_alone_are_called_tiny(device: torch.device) -> None:
    case = Case(96, 48, 8, torch.float32, device)
    h, ids, weights = case.random(3, 96), torch.tensor([[0, 1], [2, 3], [5, 4]], dtype=torch.int32), torch.ones(3, 2)
    assert isinstance(case.experts, TritonAdaptedExperts)
    alone = case.experts._experts.add_to(h.to(device), ids.to(device), weights.to(device), None)
    assert torch.equal(case.run(h, ids, weights, None, None), alone)
    out = case.run(h, ids, weights, None, torch.zeros(3, dtype=torch.int32))
    assert relative_error(out, alone) < tolerance(torch.float32)
