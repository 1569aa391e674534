"""Experts of every format with adapters: the Triton kernels against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import relative_error, tolerance
from tests.kernels.experts.cuts import with_cut

pytest.importorskip("triton")

from aengine.kernels.experts.few_rows import FewConfig, FewCut
from aengine.kernels.experts.fp8_rows import Fp8ManyConfig, Fp8ManyPass
from aengine.kernels.experts.many_rows import ManyConfig, ManyCut, ManyPass
from aengine.kernels.experts.packed.few_rows import PackedFewConfig
from aengine.kernels.experts.packed.rows import PackedConfig, PackedCut
from aengine.kernels.experts.products import float_experts, fp8_experts, packed_experts
from aengine.kernels.experts.rule import SILU, ExpertRule, GateClamp
from aengine.kernels.experts.triton_experts import TritonExperts
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.lora.base import AdapterWeights, ExpertAdapters, TokenAdapters
from aengine.kernels.lora.triton_adapted import TritonAdaptedExperts
from aengine.kernels.triton_kernels import TritonKernels
from tests.kernels.experts.fp8.test_fp8_experts import fp8_weight, rounded
from tests.kernels.experts.packed.test_packed_experts import packed_weight
from tests.kernels.experts.test_triton_experts import GELU, UNGATED, activation

pytestmark = [
    pytest.mark.gpu,
    # For the interpreter: rows after the last one are undefined, and rows of pairs without an expert are computed.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

PLACES = 4
FORMATS = ["floats", "fp8-blocks", "fp8-channels", "int4-32", "int4-128", "int4-zeros", "mxfp4"]
FEW = FewConfig(16, FewCut(16, 128, 2, 4), FewCut(32, 64, 2, 4))
CUTS: dict[str, tuple[str, object]] = {  # format, config; in addition to the shapes' own configs
    "few": ("floats", FEW),
    "many": ("floats", ManyConfig(64, ManyCut(128, 64, 3, 4), ManyCut(64, 64, 3, 4))),
    "many-gathered": ("floats", ManyConfig(64, ManyCut(128, 64, 3, 4), ManyCut(64, 64, 3, 4), gather=True)),
    "fp8-few": ("fp8-blocks", FEW),
    "fp8-many": ("fp8-blocks", Fp8ManyConfig(64, ManyCut(64, 128, 2, 4, 0), ManyCut(128, 128, 2, 4, 0))),
    "fp8-many-channels": ("fp8-channels", Fp8ManyConfig(64, ManyCut(64, 128, 2, 4), ManyCut(64, 128, 2, 4))),
    "packed": ("int4-128", PackedConfig(16, PackedCut(16, 2, 4), PackedCut(32, 2, 4))),
    "packed-ahead": ("mxfp4", PackedConfig(32, PackedCut(32, 2, 4, ahead=True), PackedCut(64, 2, 4, ahead=True))),
    "packed-few": ("mxfp4", PackedFewConfig(1)),
}


@dataclass(frozen=True)
class Sizes:
    experts: int
    top_k: int
    hidden: int
    inter: int
    rank: int


TINY = Sizes(4, 2, 256, 128, 8)


class Case:
    """A layer of experts with adapters, and its exact weights."""

    def __init__(
        self, form: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, rule: ExpertRule = SILU
    ) -> None:
        torch.manual_seed(sizes.hidden + sizes.rank)
        self.sizes, self.dtype, self.device, self.rule, self.tokens = sizes, dtype, device, rule, TokenAdapters()
        experts, hidden, inter = sizes.experts, sizes.hidden, sizes.inter
        self.first, self.second = self._adapters(hidden, (inter,) * rule.parts), self._adapters(inter, (hidden,))
        self.formats: tuple[Fp8Weight, Fp8Weight] | None = None
        self.alone: TritonExperts
        shapes = (experts, rule.parts * inter, hidden), (experts, hidden, inter)
        if form == "floats":
            self.gate_up, self.down = (self.random(*shape, scale=shape[-1] ** -0.5) for shape in shapes)
            self.alone = float_experts(self.gate_up, self.down, rule)
        elif form.startswith("fp8"):
            one, other = (fp8_weight(*shape, form.removeprefix("fp8-"), device) for shape in shapes)
            self.formats, self.gate_up, self.down = (one, other), one.dequantize(), other.dequantize()
            self.alone = fp8_experts(one, other, rule)
        else:
            packed, another = (packed_weight(*shape, form, device) for shape in shapes)
            self.gate_up, self.down = packed.dequantize(), another.dequantize()
            self.alone = packed_experts(packed, another, rule)
        adapted = TritonKernels().adapted_experts(self.alone, ExpertAdapters(self.first, self.second), self.tokens)
        assert isinstance(adapted, TritonAdaptedExperts)
        self.experts = adapted

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def _adapters(self, k: int, outputs: tuple[int, ...]) -> list[AdapterWeights]:
        made = []
        for _ in range(self.sizes.experts):
            a = self.random(PLACES, len(outputs) * self.sizes.rank, k, scale=k**-0.5)
            b = self.random(PLACES, sum(outputs), self.sizes.rank, scale=self.sizes.rank**-0.5)
            a[0], b[0] = float("nan"), float("nan")  # never read
            made.append(AdapterWeights(a, b, outputs))
        return made

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return h, ids (some are no expert), weights and places."""
        count, top_k = self.sizes.experts, self.sizes.top_k
        h, weights = self.random(tokens, self.sizes.hidden), torch.rand(tokens, top_k, device=self.device)
        ids = torch.rand(tokens, count + 1).argsort(dim=1)[:, :top_k].int() - 1
        places = torch.randint(0, PLACES, (tokens,), dtype=torch.int32)
        places[0] = 2
        return h, ids.to(self.device), weights, places.to(self.device)

    def run(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, places: Tensor | None) -> Tensor:
        self.tokens.places = places
        return self.experts.add_to(h, ids, weights, None if residual is None else residual.clone())

    def expected(
        self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, places: Tensor, rounds: bool = False
    ) -> Tensor:
        """Compute in float64, expert by expert.

        rounds: whether the inputs of the base's products are rounded to FP8.
        """
        total = torch.zeros_like(h, dtype=torch.float64) if residual is None else residual.double()
        for expert in range(self.sizes.experts):
            token, j = (ids == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            both = self._product(h[token], self.gate_up, self.first, 0, expert, places[token], rounds)
            inner = activation(both, self.rule)
            rows = self._product(inner, self.down, self.second, 1, expert, places[token], rounds)
            total.index_add_(0, token, weights[token, j, None].double() * rows)
        return total

    def _product(
        self, x: Tensor, matrices: Tensor, adapters: list[AdapterWeights], which: int, expert: int, places: Tensor,
        rounds: bool,
    ) -> Tensor:  # fmt: skip
        given = rounded(x, self.formats[which]) if rounds and self.formats is not None else x.double()
        out = given @ matrices[expert].double().T
        if self.rule.biases is not None:
            out += self.rule.biases[which][expert].double()
        own, rank = adapters[expert], self.sizes.rank
        for place in range(1, PLACES):
            mine = (places == place).nonzero().flatten()
            inner = x[mine].double() @ own.a[place].double().T
            at = 0
            for part, width in enumerate(own.outputs):
                factor = own.b[place, at : at + width].double()
                out[mine, at : at + width] += inner[:, part * rank : (part + 1) * rank] @ factor.T
                at += width
        return out


def rule_of(kind: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> ExpertRule:
    """The rule of gpt-oss, or a part of it, with limits that some gates and ups exceed."""
    torch.manual_seed(3)
    shapes = (sizes.experts, 2 * sizes.inter), (sizes.experts, sizes.hidden)
    gate_up, down = (torch.randn(*shape, device=device).to(dtype) for shape in shapes)
    if kind == "gelu":
        return GELU
    if kind == "ungated":
        return UNGATED
    return ExpertRule(
        None if kind == "biases" else GateClamp(1.702, 0.75), None if kind == "clamp" else (gate_up, down)
    )


def allowed(case: Case, rounds: bool = False) -> float:
    """The tolerance of two products in a row. Rounding to FP8 may break ties differently, and the interpreter's loses a
    carry.
    """
    if rounds:
        return 0.3 if case.device.type == "cpu" else 2.5e-2
    return 2 * tolerance(case.dtype)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rank", [8, 20])
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_every_pair_gets_its_tokens_adapter_in_its_expert_tiny(
    tokens: int, rank: int, residual: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case("floats", Sizes(6, 2, 96, 48, rank), dtype, device)
    h, ids, weights, places = case.inputs(tokens)
    onto = case.random(tokens, 96) if residual else None
    out = case.run(h, ids, weights, onto, places)
    assert relative_error(out, case.expected(h, ids, weights, onto, places)) < allowed(case)


@pytest.mark.parametrize("rule", ["plain", "all", "ungated"])
@pytest.mark.parametrize("form", FORMATS)
def test_in_every_format_tiny(form: str, rule: str, dtype: torch.dtype, device: torch.device) -> None:
    if form.startswith("fp8") and rule == "all":
        pytest.skip("such experts are dequantised")
    case = Case(form, TINY, dtype, device, SILU if rule == "plain" else rule_of(rule, TINY, dtype, device))
    h, ids, weights, places = case.inputs(7)
    onto = case.random(7, TINY.hidden)
    out = case.run(h, ids, weights, onto, places)
    rounds = isinstance(case.alone.begin(h, ids), Fp8ManyPass)
    assert relative_error(out, case.expected(h, ids, weights, onto, places, rounds)) < allowed(case, rounds)


@pytest.mark.parametrize("rule", ["biases", "clamp", "gelu", "ungated"])
def test_every_activation_between_the_products_tiny(rule: str, device: torch.device) -> None:
    case = Case("floats", TINY, torch.float32, device, rule_of(rule, TINY, torch.float32, device))
    h, ids, weights, places = case.inputs(5)
    out = case.run(h, ids, weights, None, places)
    assert relative_error(out, case.expected(h, ids, weights, None, places)) < allowed(case)


@pytest.mark.parametrize("cut", CUTS)
def test_every_config_tiny(cut: str, device: torch.device) -> None:
    form, config = CUTS[cut]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    plain = form.startswith("fp8")
    case = Case(form, TINY, dtype, device, SILU if plain else rule_of("all", TINY, dtype, device))
    case.experts._experts = with_cut(case.alone, config)
    tokens = 40 if device.type == "cuda" else 8
    h, ids, weights, places = case.inputs(tokens)
    onto, rounds = case.random(tokens, TINY.hidden), isinstance(config, Fp8ManyConfig)
    outs = [case.run(h, ids, weights, onto, places) for _ in range(2)]
    assert relative_error(outs[0], case.expected(h, ids, weights, onto, places, rounds)) < allowed(case, rounds)
    assert torch.equal(*outs)


def test_without_adapters_only_the_experts_are_called_tiny(device: torch.device) -> None:
    case = Case("floats", Sizes(6, 2, 96, 48, 8), torch.float32, device)
    h, ids, weights, places = case.inputs(3)
    alone = case.experts._experts.add_to(h, ids, weights, None)
    assert torch.equal(case.run(h, ids, weights, None, None), alone)
    assert relative_error(case.run(h, ids, weights, None, torch.zeros_like(places)), alone) < tolerance(torch.float32)


MODELS = {  # adapters' rank, rule, format
    "qwen3-30b": (Sizes(128, 8, 2048, 768, 16), "plain", ["floats", "fp8-blocks", "int4-128"]),
    "gpt-oss-20b": (Sizes(32, 4, 2880, 2880, 8), "all", ["floats", "mxfp4"]),
}


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 40, 300, 3000])
@pytest.mark.parametrize(
    ("model", "form"), [(model, form) for model, (_, _, forms) in MODELS.items() for form in forms]
)
def test_shapes_of_real_models(model: str, form: str, tokens: int, device: torch.device) -> None:
    """With the configs of the shapes, and the same result in every call."""
    sizes, rule, _ = MODELS[model]
    dtype = torch.bfloat16
    case = Case(form, sizes, dtype, device, SILU if rule == "plain" else rule_of(rule, sizes, dtype, device))
    h, ids, weights, places = case.inputs(tokens)
    onto = case.random(tokens, sizes.hidden)
    outs = [case.run(h, ids, weights, onto, places) for _ in range(2)]
    rounds = isinstance(case.alone.begin(h, ids), Fp8ManyPass)
    assert relative_error(outs[0], case.expected(h, ids, weights, onto, places, rounds)) < allowed(case, rounds)
    assert torch.equal(*outs)
    case.tokens.places = places
    graph, there = torch.cuda.CUDAGraph(), onto.clone()
    with torch.cuda.graph(graph):
        captured = case.experts.add_to(h, ids, weights, there)
    there.copy_(onto)
    graph.replay()
    assert torch.equal(captured, outs[0])


def test_many_rows_are_sorted_and_few_are_not(device: torch.device) -> None:
    """So the tests above cover both."""
    case = Case("floats", MODELS["qwen3-30b"][0], torch.bfloat16, device)
    few, many = (case.alone.begin(*case.inputs(tokens)[:2]) for tokens in (1, 3000))
    assert not few.sorted
    assert isinstance(many, ManyPass) is many.sorted
