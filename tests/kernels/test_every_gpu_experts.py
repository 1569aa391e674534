"""Kernels of experts and adapters compile for several GPUs and fit their shared memory.

Adapters are compiled in combinations that cover every pair of GPU, shape, tokens and rank. Each shape of a router has
one or many tokens, one shape has both. Every second shape of the others is compiled for one more GPU than an H200. Each
test has at least one shape for each GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from aengine.kernels import elementwise
from aengine.kernels.experts.products import FloatProducts, float_experts, fp8_experts, packed_experts
from aengine.kernels.experts.routing.route import Route
from aengine.kernels.experts.routing.route_rows import RouteRows
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.experts.rule import ExpertRule, GateClamp
from aengine.kernels.experts.single_rows import SharedMatrices
from aengine.kernels.experts.triton_experts import TritonExperts
from aengine.kernels.linear.weights.e2m1 import Mxfp4Weight, Nvfp4Weight
from aengine.kernels.linear.weights.fp8 import Activations, Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.kernels.lora.base import AdapterWeights, ExpertAdapters, TokenAdapters
from aengine.kernels.triton_kernels import TritonKernels
from tests.kernels.gpus import HAVE_FP8, REGISTERS, Compiler, eighth, every_gpu, half, ints, longs, octets, single
from tests.kernels.offline import MARKS

SUPER = (2688, 1024), (1024, 2688)  # of an expert's up and down
pytestmark = [*MARKS, pytest.mark.slow, pytest.mark.turns("compiler", always=("H200",), every=2, each=True)]

compiler = every_gpu


@pytest.mark.thinned
@pytest.mark.parametrize("rank", [16, 64, 256])
@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize(("k", "outputs"), [(4096, (4096, 1024, 1024)), (4096, (12288, 12288)), (12288, (4096,))])
def test_adapters(compiler: Compiler, k: int, outputs: tuple[int, ...], tokens: int, rank: int) -> None:
    kernels, adapters, n = TritonKernels(), TokenAdapters(), sum(outputs)
    weights = AdapterWeights(half(9, len(outputs) * rank, k), half(9, n, rank), outputs)
    linear = kernels.adapted(kernels.dense(half(n, k), None), weights, adapters)
    adapters.places = ints(tokens)
    linear.apply(half(tokens, k), norm=elementwise.TritonNorm(half(k), 1e-6))
    linear.apply_activated(half(tokens, k))
    linear.apply(half(tokens, 2 * k), gated=True, residual=half(tokens, n))


@pytest.mark.thinned
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rank", [16, 100])
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("new", [half, single])
def test_adapters_of_experts(
    compiler: Compiler, new: Callable[..., Tensor], tokens: int, rank: int, gated: bool
) -> None:
    rule = ExpertRule(GateClamp(1.702, 7.0), (new(4, 1536), new(4, 2048))) if gated else ExpertRule(gated=False)
    adapt_experts(TritonKernels().experts(new(4, rule.parts * 768, 2048), new(4, 2048, 768), rule), new, tokens, rank)


@HAVE_FP8
@pytest.mark.parametrize("tokens", [1, 300])
def test_adapters_of_experts_with_fp8_weights(compiler: Compiler, tokens: int) -> None:
    gate_up, down = (
        Fp8Weight(eighth(4, n, k), single(4, n // 128, k // 128), (128, 128), "group")
        for n, k in ((1536, 2048), (2048, 768))
    )
    adapt_experts(fp8_experts(gate_up, down), half, tokens, 16)


@pytest.mark.parametrize("tokens", [1, 300, 4000])
@pytest.mark.parametrize("group", [32, 128])
def test_adapters_of_experts_with_4_bit_weights(compiler: Compiler, tokens: int, group: int) -> None:
    gate_up, down = (
        Int4Weight(octets(4, n, k), half(4, n, k // group), octets(4, n, k // group))
        for n, k in ((1536, 2048), (2048, 768))
    )
    adapt_experts(packed_experts(gate_up, down), half, tokens, 16)


def adapt_experts(experts: TritonExperts, new: Callable[..., Tensor], tokens: int, rank: int) -> None:
    """Four experts of 768, two for each token."""
    adapters = TokenAdapters()
    parts = experts.rule.parts
    gate_up = AdapterWeights(new(9, parts * rank, 2048), new(9, parts * 768, rank), (768,) * parts)
    down = AdapterWeights(new(9, rank, 768), new(9, 2048, rank), (2048,))
    adapted = TritonKernels().adapted_experts(experts, ExpertAdapters([gate_up] * 4, [down] * 4), adapters)
    adapters.places = ints(tokens)
    adapted.add_to(new(tokens, 2048), ints(tokens, 2), single(tokens, 2), new(tokens, 2048))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inter", "new"),
    [
        (1, 128, 8, 2048, 768, half),
        (64, 128, 8, 2048, 768, half),
        (1024, 128, 8, 2048, 768, half),
        (16384, 128, 8, 2048, 768, half),
        (300, 8, 2, 4096, 14336, half),
        (16, 8, 2, 1024, 512, single),
    ],
)
def test_experts(
    compiler: Compiler, tokens: int, experts: int, top_k: int, hidden: int, inter: int, new: Callable[..., Tensor]
) -> None:
    h, gate_up, down = new(tokens, hidden), new(experts, 2 * inter, hidden), new(experts, hidden, inter)
    size, ids = h.element_size(), ints(tokens, top_k)
    layer = float_experts(gate_up, down)
    layer.add_to(h, ids, single(tokens, top_k), new(tokens, hidden))
    assert_fits(layer, compiler, tokens, top_k, h.dtype, size)


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inter", "shared"),
    [(256, 8, 2048, 512, 512), (512, 10, 2048, 512, 512), (64, 6, 2048, 1408, 2816)],
)
def test_experts_beside_one_that_all_tokens_pass(
    compiler: Compiler, experts: int, top_k: int, hidden: int, inter: int, shared: int
) -> None:
    products = float_experts(half(experts, 2 * inter, hidden), half(experts, hidden, inter)).products
    own = SharedMatrices(half(2 * shared, hidden), half(hidden, shared), half(1, hidden))
    assert own.can_fuse(half(4, hidden), top_k)
    assert isinstance(products, FloatProducts)
    layer = TritonExperts(products.with_shared(own))
    layer.add_to(half(4, hidden), ints(4, top_k), single(4, top_k), half(4, hidden))


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_experts_without_a_gate(compiler: Compiler, tokens: int) -> None:
    """Of the sizes of Nemotron 3, the larger ones in NVFP4, and in FP8 if the GPU has it."""
    rule = ExpertRule(gated=False)
    formats = [
        float_experts(half(128, 1856, 2688), half(128, 2688, 1856), rule),
        packed_experts(
            *(Nvfp4Weight(octets(64, n, k // 2), eighth(64, n, k // 16), single(64, n, 1)) for n, k in SUPER), rule
        ),
    ]
    if compiler.gpu.capability >= 89:
        tensor = (Fp8Weight(eighth(64, *size), single(64, 1, 1), size, "static", single(64)) for size in SUPER)
        scales = (single(64, n // 128, k // 128) for n, k in SUPER)
        blocks = (Fp8Weight(eighth(64, *size), one, (128, 128), "group") for size, one in zip(SUPER, scales))
        formats += [fp8_experts(*tensor, rule), fp8_experts(*blocks, rule)]
    for layer in formats:
        h = half(tokens, layer.hidden)
        layer.add_to(h, ints(tokens, 6), single(tokens, 6), h)


@HAVE_FP8
@pytest.mark.parametrize("tokens", [1, 64, 1024])
@pytest.mark.parametrize(("block", "activations"), [((128, 128), "group"), ((1, 4096), "token"), ((1, 4096), "static")])
def test_experts_with_fp8_weights(
    compiler: Compiler, tokens: int, block: tuple[int, int], activations: Activations
) -> None:
    experts, top_k, hidden, inter = 128, 8, 2048, 768
    known = single(experts) if activations == "static" else None
    gate_up, down = (
        Fp8Weight(eighth(experts, n, k), single(experts, n // block[0], -(-k // block[1])), block, activations, known)
        for n, k in ((2 * inter, hidden), (hidden, inter))
    )
    layer = fp8_experts(gate_up, down)
    layer.add_to(half(tokens, hidden), ints(tokens, top_k), single(tokens, top_k), half(tokens, hidden))
    assert_fits(layer, compiler, tokens, top_k, torch.bfloat16, 1)


def assert_fits(
    layer: TritonExperts, compiler: Compiler, tokens: int, top_k: int, dtype: torch.dtype, weight_size: int
) -> None:
    """Check that kernels take no more shared memory than the config says."""
    if layer.products.single_config(tokens, top_k, dtype, compiler.gpu.launch) is None:
        config = layer.products.tile_config(tokens, top_k, dtype, compiler.gpu.launch)
        assert max(compiler.shared) <= config.shared_memory(dtype.itemsize, weight_size) + 1024


@pytest.mark.parametrize("tokens", [1, 1024])
@pytest.mark.parametrize("group", [32, 128])
def test_experts_with_4_bit_weights(compiler: Compiler, tokens: int, group: int) -> None:
    experts, top_k, hidden, inter = 128, 8, 2048, 768
    gate_up, down = (
        Int4Weight(octets(experts, n, k), half(experts, n, k // group), octets(experts, n, k // group))
        for n, k in ((2 * inter, hidden), (hidden, inter))
    )
    layer = packed_experts(gate_up, down)
    layer.add_to(half(tokens, hidden), ints(tokens, top_k), single(tokens, top_k), half(tokens, hidden))


@pytest.mark.parametrize("tokens", [1, 4, 2048])
def test_experts_in_nvfp4(compiler: Compiler, tokens: int) -> None:
    gate_up, down = (
        Nvfp4Weight(octets(128, n, k // 2), eighth(128, n, k // 16), single(128, n, 1))
        for n, k in ((1536, 2048), (2048, 768))
    )
    layer = packed_experts(gate_up, down)
    layer.add_to(half(tokens, 2048), ints(tokens, 8), single(tokens, 8), half(tokens, 2048))


@pytest.mark.parametrize("tokens", [8, 64, 300])
def test_experts_in_mxfp4(compiler: Compiler, tokens: int) -> None:
    """Of gpt-oss-120b. An H200 has a kernel for few rows."""
    rule = ExpertRule(GateClamp(1.702, 7.0), (half(128, 5760), half(128, 2880)))
    gate_up, down = (Mxfp4Weight(octets(128, n, 1440), octets(128, n, 90)) for n in (5760, 2880))
    layer = packed_experts(gate_up, down, rule)
    layer.add_to(half(tokens, 2880), ints(tokens, 4), single(tokens, 4), half(tokens, 2880))
    few = [count for name, count in zip(compiler.names, compiler.registers) if name == "_packed_few_kernel"]
    assert len(few) == (2 if compiler.gpu.launch.warp_groups and tokens <= 128 else 0)
    if few and tokens == 64:
        assert few[0] <= REGISTERS // 8  # so eight programs of gate and up run on a processor
    adapt_experts(layer, half, tokens, 16)


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"), [(1, 128, 2048), (16384, 128, 2048), (16384, 512, 2880), (1, 256, 7168)]
)
def test_the_router(compiler: Compiler, tokens: int, experts: int, hidden: int) -> None:
    Route()(half(tokens, hidden), half(experts, hidden), Router(8, "sigmoid", True, 8, 4), correction=single(experts))
    Route()(half(tokens, hidden), single(experts, hidden), Router(8, "softmax", True))
    if experts == 256:
        Route()(half(tokens, 4096), half(16, 4096), Router(2, "sparsemixer", jitter=0.01))


@pytest.mark.parametrize(("experts", "hidden"), [(128, 2048), (256, 7168)])
def test_the_router_of_few_rows(compiler: Compiler, experts: int, hidden: int) -> None:
    norm = elementwise.TritonNorm(half(hidden), 1e-6)
    RouteRows()(half(4, hidden), norm, half(experts, hidden), Router(8, "softmax", True), slots=longs(4), first_slot=16)
