"""Linears with adapters against a float64 reference: shapes, ranks, mixes of adapters, methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import relative_error, tolerance

pytest.importorskip("triton")

from aengine.kernels.elementwise import TritonNorm
from aengine.kernels.linear.base import Linear
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.lora.base import AdapterWeights, TokenAdapters
from aengine.kernels.lora.triton_adapted import DenseAdapted, TritonAdapted
from aengine.kernels.parts import Parts
from aengine.kernels.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

CALLS = ("plain", "residual", "norm", "gated", "gated residual")
SHAPES = [  # inputs, outputs of each part
    pytest.param(96, (64,), id="tiny"),
    pytest.param(160, (128, 64, 64), id="tiny-fused"),
    pytest.param(144, (40, 24), id="tiny-uneven"),
    pytest.param(1040, (64, 64), id="tiny-long"),
    pytest.param(4096, (4096, 1024, 1024), id="qkv"),
    pytest.param(12288, (4096,), id="down"),
]
MIXES: dict[str, Callable[[int], list[int]]] = {
    "none": lambda tokens: [0] * tokens,
    "one": lambda tokens: [2] * tokens,
    "mixed": lambda tokens: [(7 * i + 3) % 5 for i in range(tokens)],
}
PLACES = 5


class Case:
    """A linear, its adapters, and the expected results."""

    def __init__(
        self, inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator(device).manual_seed(inputs + rank)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

        self.random = random
        n = sum(outputs)
        self.weight, self.bias = random(n, inputs, scale=inputs**-0.5), random(n)
        a = random(PLACES, len(outputs) * rank, inputs, scale=inputs**-0.5)
        b = random(PLACES, n, rank, scale=rank**-0.5)
        a[0], b[0] = 0, 0
        self.adapters = AdapterWeights(a, b, outputs)
        self.norm = TritonNorm(random(inputs), 1e-5)
        self.tokens = TokenAdapters()
        self.kernels = TritonKernels()
        self.linear = self.kernels.adapted(self.kernels.dense(self.weight, self.bias), self.adapters, self.tokens)

    def product(self, x: Tensor, places: list[int]) -> Tensor:
        """x [tokens, inputs] float64 -> [tokens, outputs] float64."""
        a, b = self.adapters.a.double(), self.adapters.b.double()
        out, rank = F.linear(x, self.weight.double(), self.bias.double()), self.adapters.rank
        for token, place in enumerate(places):
            inner = (a[place] @ x[token]).split(rank)
            parts = b[place].split(self.adapters.outputs)
            out[token] += torch.cat([second @ first for second, first in zip(parts, inner)])
        return out

    def run(self, call: str, linear: Linear, places: list[int]) -> tuple[Tensor, Tensor]:
        """Return the result of the call, and the expected one."""
        tokens, (n, k) = len(places), self.weight.shape
        x, gate_up, residual = self.random(tokens, k, scale=2), self.random(tokens, 2 * k), self.random(tokens, n)
        wide, after = x.double(), residual.double()
        gate, up = gate_up.double().chunk(2, dim=-1)
        if call == "plain":
            return linear.apply(x), self.product(wide, places)
        if call == "residual":
            return linear.apply(x, residual=residual), self.product(wide, places) + after
        if call == "gated":
            return linear.apply(gate_up, gated=True), self.product(F.silu(gate) * up, places)
        if call == "gated residual":
            out = linear.apply(gate_up, gated=True, residual=residual)
            return out, self.product(F.silu(gate) * up, places) + after
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.norm.weight.double()
        return linear.apply(x, norm=self.norm), self.product(normed, places)

    def set(self, places: list[int], device: torch.device) -> None:
        self.tokens.places = torch.tensor(places, dtype=torch.int32, device=device)


@pytest.mark.thinned
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("rank", [8, 16, 64, 100])
@pytest.mark.parametrize("tokens", [1, 3, 20, 64, 70])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_every_method_adds_each_tokens_own_adapter(
    inputs: int,
    outputs: tuple[int, ...],
    tokens: int,
    rank: int,
    mix: str,
    call: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    case, places = Case(inputs, outputs, rank, dtype, device), MIXES[mix](tokens)
    assert isinstance(case.linear, DenseAdapted)
    case.set(places, device)
    out, expected = case.run(call, case.linear, places)
    assert relative_error(out, expected) < tolerance(dtype)


def test_one_row_after_a_norm_with_float32_weights_tiny(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(2048, (64, 64), 8, dtype, device)
    case.norm = TritonNorm(1 + case.random(2048, scale=0.1).float(), 1e-5)
    case.set([2], device)
    assert dtype == torch.float32 or case.linear._dense.norms(case.random(1, 2048), case.norm)
    out, expected = case.run("norm", case.linear, [2])
    assert relative_error(out, expected) < tolerance(dtype)


@pytest.mark.parametrize("rank", [1, 8, 24, 128, 256])
@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_every_rank_is_right_tiny(rank: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    case, places = Case(96, (64, 32), rank, dtype, device), MIXES["mixed"](tokens)
    case.set(places, device)
    out, expected = case.run("plain", case.linear, places)
    assert relative_error(out, expected) < tolerance(dtype)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_linear_of_another_format_is_followed_by_two_kernels_tiny(
    tokens: int, call: str, dtype: torch.dtype, device: torch.device
) -> None:
    case, places = Case(160, (128, 64), 16, dtype, device), MIXES["mixed"](tokens)
    plain = TritonAdapted(case.linear._linear, case.adapters, case.tokens, case.linear._order, Parts())
    case.set(places, device)
    out, expected = case.run(call, plain, places)
    assert relative_error(out, expected) < tolerance(dtype)


def test_without_adapters_the_linear_itself_is_asked_tiny(device: torch.device) -> None:
    class Activates:
        inputs, outputs = 96, 128

        def apply_activated(self, x: Tensor, norm: object) -> Tensor:
            return x + 1 if norm is None else x + 2

    case = Case(96, (64, 64), 16, torch.float32, device)
    order = case.linear._order
    adapted = TritonAdapted(cast(Linear, Activates()), case.adapters, case.tokens, order, Parts())
    x = case.random(300, 96)
    for norm, added in ((None, 1), (case.norm, 2)):
        out = adapted.apply_activated(x, norm)
        assert out is not None
        assert torch.equal(out, x + added)
    case.set([1] * 300, device)
    assert adapted.apply_activated(x) is None


def test_a_single_row_of_a_long_matrix_has_kernels_of_its_own_tiny(device: torch.device) -> None:
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float16
    case = Case(1040, (16, 16), 16, narrow, device)
    case.set([1], device)
    for call in ("norm", "gated residual"):
        out, expected = case.run(call, case.linear, [1])
        assert relative_error(out, expected) < tolerance(narrow)


@pytest.mark.parametrize("tokens", [1, 20, 70])
@pytest.mark.parametrize("call", CALLS)
def test_tokens_without_an_adapter_get_the_same_bits_as_without_adapters_tiny(
    tokens: int, call: str, device: torch.device, dtype: torch.dtype
) -> None:
    case = Case(160, (128, 64), 16, dtype, device)
    case.set([0] * tokens, device)
    state = torch.get_rng_state()
    outs = []
    for linear in (case.linear, case.linear._linear):
        torch.set_rng_state(state)
        case.random = lambda *shape, scale=1.0: (torch.randn(*shape) * scale).to(device, dtype)
        outs.append(case.run(call, linear, [0] * tokens)[0])
    assert torch.equal(*outs)


def test_without_places_only_the_linear_is_called_tiny(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(96, (64,), 8, torch.float32, device)
    called: list[dict[str, object]] = []

    class Alone:
        inputs, outputs = 96, 64

        def apply(self, x: Tensor, **given: object) -> None:
            called.append(given)

    linear = TritonAdapted(Alone(), case.adapters, case.tokens, case.linear._order, Parts())  # type: ignore[arg-type]
    dense = DenseAdapted(Alone(), case.adapters, case.tokens, case.linear._order, Parts())  # type: ignore[arg-type]
    for one in (linear, dense):
        called.clear()
        x = torch.zeros(2, 96)
        one.apply(x), one.apply(x, norm=case.norm), one.apply(x, gated=True, residual=x)
        assert called == [
            {"norm": None, "gated": False, "residual": None},
            {"norm": case.norm, "gated": False, "residual": None},
            {"norm": None, "gated": True, "residual": x},
        ]


def test_places_are_sorted_again_whenever_they_are_set_tiny(device: torch.device) -> None:
    case = Case(96, (64,), 8, torch.float32, device)
    for places in ([1, 0, 4], [0, 3, 3], [2], [4, 3, 2, 1, 0]):
        case.set(places, device)
        out, expected = case.run("plain", case.linear, places)
        assert relative_error(out, expected) < tolerance(torch.float32)


@pytest.mark.parametrize("tokens", [1, 20])
def test_undefined_results_of_adapters_are_never_read_tiny(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch memory may hold anything; here it is NaN."""
    case, places = Case(160, (128, 64), 16, torch.float32, device), MIXES["mixed"](tokens)
    empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor,
        "new_empty",
        lambda x, *shape, **more: empty(x, *shape, **more).fill_(float("nan") if x.is_floating_point() else 0),
    )
    case.set(places, device)
    for linear in (
        case.linear,
        TritonAdapted(case.linear._linear, case.adapters, case.tokens, case.linear._order, Parts()),
    ):
        out, expected = case.run("plain", linear, places)
        assert relative_error(out, expected) < tolerance(torch.float32)


@pytest.mark.parametrize("tokens", [1, 20, 64, 200])
def test_a_graph_reads_the_current_adapters_of_its_places(tokens: int, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("there are no graphs without a GPU")
    case = Case(1024, (1024, 512), 16, torch.bfloat16, device)
    places = torch.zeros(tokens, dtype=torch.int32, device=device)
    x = case.random(tokens, 1024)
    case.tokens.places = places
    case.linear.apply(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.tokens.places = places
        hidden = x * 1.0
        for _ in range(3):
            out = case.linear.apply(hidden)
    for mix in ("mixed", "none", "one", "mixed"):
        chosen = MIXES[mix](tokens)
        places.copy_(torch.tensor(chosen, dtype=torch.int32))
        case.adapters.b[1:].mul_(0.5)
        graph.replay()
        first = out.clone()
        assert relative_error(first, case.product(x.double(), chosen)) < tolerance(torch.bfloat16)
        graph.replay()
        assert torch.equal(first, out)


def test_an_fp8_linear_takes_adapters(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("no kernel of this format is interpreted here")
    case, places = Case(512, (256, 128), 16, torch.bfloat16, device), MIXES["mixed"](40)
    codes = case.weight.to(torch.float8_e4m3fn)
    scale = torch.ones(3, 4, device=device)
    case.weight, case.bias = codes.to(torch.bfloat16), torch.zeros_like(case.bias)
    linear = case.kernels.quantized(Fp8Weight(codes, scale, (128, 128), "group"), None, torch.bfloat16)
    adapted = case.kernels.adapted(linear, case.adapters, case.tokens)
    assert not isinstance(adapted, DenseAdapted)
    case.set(places, device)
    for call in CALLS:
        out, expected = case.run(call, adapted, places)
        assert relative_error(out, expected) < 4e-2
