"""A whole decode step of a mixture of experts of random weights, sampler aside: what a model's layers launch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from aengine.kernels.attention.decode_attention import PagedDecode
from aengine.kernels.attention.heads import Heads as QueryHeads
from aengine.kernels.experts.base import Experts
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.linear.base import Linear
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.triton_kernels import TritonKernels
from bench.kernel_timing import DEVICE, Heads, Pool, Report, floor, graph_time, random_half

FIRST_SLOT = 16  # the first after page 0
POOL_PAGES = 12305  # of each layer
STEPS = ((1, 384), (1, 4096), (2, 1024), (4, 1024), (8, 1024), (16, 1024), (256, 768))


@dataclass(frozen=True)
class Mixture:
    """fp8: weights in blocks of 128 x 128, except for the router and the output matrix."""

    layers: int = 48
    hidden: int = 2048
    experts: int = 128
    inner: int = 768
    top_k: int = 8
    vocab: int = 151936
    heads: Heads = field(default_factory=lambda: Heads(32, 4, 128))
    fp8: bool = False

    @property
    def linears(self) -> list[tuple[int, int]]:
        """[n, k] of the projections of a layer's attention."""
        heads = self.heads
        return [
            ((heads.heads + 2 * heads.kv_heads) * heads.dim, self.hidden),
            (self.hidden, heads.heads * heads.dim),
        ]

    def bytes(self, rows: int, context: int) -> int:
        """Return the bytes that one step must read. Experts count as chosen by chance."""
        heads, size = self.heads, 1 if self.fp8 else 2
        weights = sum(n * k for n, k in self.linears)
        chosen = self.experts * (1 - (1 - self.top_k / self.experts) ** rows)
        weights += round(chosen * 3 * self.hidden * self.inner)
        kept = rows * context * heads.kv_heads * heads.dim * 4
        return self.layers * (weights * size + kept) + self.vocab * self.hidden * 2


MIXTURES = {"30B-A3B": Mixture(), "30B-A3B FP8": Mixture(fp8=True)}


class Layer:
    """What a layer of the model owns."""

    def __init__(self, model: Mixture, kernels: TritonKernels) -> None:
        self.kernels, self.model = kernels, model
        hidden, heads = model.hidden, model.heads
        self.norms = [kernels.norm(random_half(hidden), 1e-6) for _ in range(2)]
        self.qkv, self.out = (self._linear(n, k) for n, k in model.linears)
        self.heads = QueryHeads(heads.heads, random_half(heads.dim), random_half(heads.dim), 1e-6)
        self.route = kernels.route(random_half(model.experts, hidden), None, Router(model.top_k, "softmax", True))
        self.experts = self._experts()
        self.pool = Pool(POOL_PAGES, heads)

    def _linear(self, n: int, k: int) -> Linear:
        if self.model.fp8:
            return self.kernels.quantized(_fp8(n, k), None, torch.bfloat16)
        return self.kernels.dense(random_half(n, k, scale=0.02), None)

    def _experts(self) -> Experts:
        count, inner, hidden = self.model.experts, self.model.inner, self.model.hidden
        shapes = (count, 2 * inner, hidden), (count, hidden, inner)
        if self.model.fp8:
            gate_up, down = (_fp8(*shape) for shape in shapes)
            return self.kernels.quantized_experts(gate_up, down, torch.bfloat16)
        return self.kernels.experts(*(random_half(*shape, scale=0.02) for shape in shapes))


def _fp8(*shape: int) -> Fp8Weight:
    *lead, n, k = shape
    scale = torch.full((*lead, n // GROUP, k // GROUP), 0.02, device=DEVICE)
    return Fp8Weight(random_half(*shape).to(torch.float8_e4m3fn), scale, (GROUP, GROUP), "group")


class MixtureStep:
    """One decode step."""

    def __init__(self, model: Mixture) -> None:
        self._model, self._kernels, self._decode = model, TritonKernels(), PagedDecode()
        self._layers = [Layer(model, self._kernels) for _ in range(model.layers)]
        self._norm = self._kernels.norm(random_half(model.hidden), 1e-6)
        self._head = self._kernels.dense(random_half(model.vocab, model.hidden, scale=0.02), None)
        self._cos_sin = torch.randn(65536, model.heads.dim, device=DEVICE)

    def time(self, rows: int, context: int) -> float:
        """Microseconds."""
        tables = [layer.pool.tables(rows, context, most=1)[0] for layer in self._layers]
        lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        positions = torch.full((rows,), context - 1, device=DEVICE)
        slots = torch.arange(rows, device=DEVICE) + FIRST_SLOT
        x0 = random_half(rows, self._model.hidden)

        def step() -> Tensor:
            x = x0.clone()
            for layer, table in zip(self._layers, tables):
                cache = layer.pool.k, layer.pool.v
                qkv = layer.qkv.apply(x, norm=layer.norms[0])
                q = self._kernels.qk_norm_rope_store(qkv, layer.heads, self._cos_sin, positions, cache, slots)
                x = layer.out.apply(self._decode(q, *cache, table, lens, 0.09).flatten(1), residual=x)
                h, ids, weights = layer.route.after(layer.norms[1], x, slots, FIRST_SLOT)
                x = layer.experts.add_to(h, ids, weights, x)
            return self._head.apply(x, norm=self._norm)

        return graph_time([step])


def bench_mixture(report: Report, sweep: bool) -> None:
    for name, model in MIXTURES.items():
        step = MixtureStep(model)
        for rows, context in STEPS:
            size = model.bytes(rows, context)
            us = step.time(rows, context)
            report.add("mixture", f"{name} {rows}x{context}", us, size)
            report.say(
                f"step {name:11} {rows:3}x{context:<5} floor {floor(size):6.0f} {us:6.0f} us "
                f"{rows / us * 1e6:7.0f} tok/s"
            )
        del step
        torch.cuda.empty_cache()
