"""A whole decode step of random weights, sampler aside: with the kernels' own cuts, and a search for better ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels import elementwise
from aengine.kernels.attention.config import DecodeConfig
from aengine.kernels.attention.decode_attention import PagedDecode
from aengine.kernels.attention.heads import Heads as QueryHeads
from aengine.kernels.attention.inputs import qk_norm_rope_store
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.one_row import OneRowConfig
from aengine.kernels.linear.small_linear import LinearConfig, SmallLinear, linear_config
from aengine.kernels.linear.triton_linear import TritonLinear
from bench.kernel_timing import (
    DEVICE,
    Heads,
    Pool,
    Report,
    attempt,
    brief,
    floor,
    graph_time,
    overlapping,
    precompile,
    random_half,
)


@dataclass(frozen=True)
class Model:
    layers: int = 36
    hidden: int = 4096
    inter: int = 12288
    vocab: int = 151936
    heads: Heads = field(default_factory=Heads)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """[n, k] of each weight of a layer."""
        heads, hidden = self.heads, self.hidden
        return {
            "qkv": ((heads.heads + 2 * heads.kv_heads) * heads.dim, hidden),
            "o": (hidden, heads.heads * heads.dim),
            "gate_up": (2 * self.inter, hidden),
            "down": (hidden, self.inter),
        }


MODELS = {"8B": Model(), "0.6B": Model(28, 1024, 3072, 151936, Heads(16, 8, 128))}
OTHER_MODELS = {
    "Qwen2.5-7B": Model(28, 3584, 18944, 152064, Heads(28, 4, 128)),
    "Qwen2.5-1.5B": Model(28, 1536, 8960, 151936, Heads(12, 2, 128)),
    "Qwen2.5-0.5B": Model(24, 896, 4864, 151936, Heads(14, 2, 64)),
    "Llama-3.2-3B": Model(28, 3072, 8192, 128256, Heads(24, 8, 128)),
    "Llama-3.2-1B": Model(16, 2048, 8192, 128256, Heads(32, 8, 64)),
}
POOL_PAGES = 24577  # of each layer
STEPS = ((1, 384), (1, 4096), (1, 32768), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (256, 768))


class Step:
    """One decode step; the cut of each linear and of the attention can be chosen."""

    def __init__(self, model: Model) -> None:
        self.model = model
        shapes = model.linears.items()
        self.weights = [{name: random_half(*shape, scale=0.02) for name, shape in shapes} for _ in range(model.layers)]
        self.lm_head = random_half(model.vocab, model.hidden, scale=0.02)
        # Each layer its own, as in a model: what another layer has just read would come out of a cache, addresses
        # translated.
        self.norms = [random_half(model.hidden) for _ in range(2 * model.layers + 1)]
        self.head_norms = [random_half(model.heads.dim) for _ in range(2 * model.layers)]
        self.pools = [Pool(POOL_PAGES, model.heads) for _ in range(model.layers)]
        self.cos_sin = torch.randn(65536, model.heads.dim, device=DEVICE)

    def bytes(self, rows: int, context: int) -> int:
        model, heads = self.model, self.model.heads
        weights = sum(n * k for n, k in model.linears.values()) * model.layers + model.vocab * model.hidden
        return weights * 2 + model.layers * rows * context * heads.kv_heads * heads.dim * 4

    def time(self, rows: int, context: int, cuts: dict[str, Any], own: bool = True, overlap: bool = True) -> float:
        """Return microseconds. own: use our kernel for the linears it supports, not the library for all."""
        model, heads = self.model, self.model.heads
        tables = [pool.tables(rows, context, most=1)[0] for pool in self.pools]
        lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        positions = torch.full((rows,), context - 1, device=DEVICE)
        slots = torch.arange(rows, device=DEVICE)
        small, decode = SmallLinear(), PagedDecode()
        x0 = random_half(rows, model.hidden)

        def linear(x: Tensor, weight: Tensor, name: str) -> Tensor:
            if own and _has_few_rows(x, weight):
                return small(x, weight, config=cuts.get(name))
            return F.linear(x, weight)

        def norm_linear(x: Tensor, norm: Tensor, weight: Tensor, name: str) -> Tensor:
            cut, of_x = cuts.get(name), elementwise.TritonNorm(norm, 1e-6)
            whole = isinstance(cut, OneRowConfig) and cut.early >= x.shape[1]
            if own and (TritonLinear(weight, None, small).norms(x, of_x) if cut is None else whole):
                return small(x, weight, config=cut, norm=of_x)
            return linear(elementwise.rms_norm(x, norm, 1e-6), weight, name)

        def linear_add(x: Tensor, weight: Tensor, name: str, residual: Tensor) -> Tensor:
            if own and _has_few_rows(x, weight):
                return small(x, weight, config=cuts.get(name), residual=residual)
            return residual.addmm_(x, weight.t())

        def step() -> Tensor:
            x = x0.clone()
            for layer, w in enumerate(self.weights):
                q_norm, k_norm = self.head_norms[2 * layer : 2 * layer + 2]
                pool = self.pools[layer]
                qkv = norm_linear(x, self.norms[2 * layer], w["qkv"], "qkv")
                q = qk_norm_rope_store(
                    qkv, QueryHeads(heads.heads, q_norm, k_norm, 1e-6), self.cos_sin, positions, (pool.k, pool.v), slots
                )
                mixed = decode(q, pool.k, pool.v, tables[layer], lens, 0.09, config=cuts.get("decode"))
                x = linear_add(mixed.flatten(1), w["o"], "o", x)
                inner = elementwise.silu_mul(norm_linear(x, self.norms[2 * layer + 1], w["gate_up"], "gate_up"))
                x = linear_add(inner, w["down"], "down", x)
            return linear(elementwise.rms_norm(x, self.norms[-1], 1e-6), self.lm_head, "lm_head")

        with overlapping(overlap):
            return graph_time([step])


def _has_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether our own kernel computes the product."""
    return linear_config(len(x), *weight.shape, x.element_size(), launch_for(x.device)) is not None


def bench_step(report: Report, sweep: bool) -> None:
    for name, model in MODELS.items():
        step = Step(model)
        for rows, context in STEPS:
            size = step.bytes(rows, context)
            for own, overlap in ((True, True), (True, False), (False, True)):
                us = step.time(rows, context, {}, own, overlap)
                what = "own linears" if own else "cuBLAS"
                report.add("step", f"{name} {rows}x{context}", us, size, variant=what, overlap=overlap)
                report.say(
                    f"step {name:4} {rows:3}x{context:<5} {what:11} overlap {overlap!s:5} floor {floor(size):6.0f} "
                    f"{us:6.0f} us {rows / us * 1e6:7.0f} tok/s"
                )
        del step
        torch.cuda.empty_cache()
    if sweep:
        bench_tune(report)


def bench_shapes(report: Report, sweep: bool) -> None:
    """What other numbers of heads and other head dimensions do to a step, and to the choice of attention's cut."""
    cuts = [None, *DECODE_CONFIGS] if sweep else [None]
    for name, model in OTHER_MODELS.items():
        precompile(compile_decode, [(model.heads, rows, cut) for rows in (1, 8, 256) for cut in cuts], report)
        time_shape(name, Step(model), cuts, report)
        torch.cuda.empty_cache()


def time_shape(name: str, step: Step, cuts: Sequence[DecodeConfig | None], report: Report) -> None:
    for rows, context in ((1, 384), (1, 8192), (1, 32768), (8, 4096), (64, 1024), (256, 768)):
        size, results = step.bytes(rows, context), list[tuple[float, str]]()
        for cut in cuts:
            for us, _ in attempt(lambda: step.time(rows, context, {"decode": cut} if cut else {}), cut):
                report.add("shapes", f"{name} {rows}x{context}", us, size, variant=brief(cut))
                results.append((us, brief(cut)))
        best = "; ".join(f"{us:.0f} {cut}" for us, cut in sorted(results)[:4])
        report.say(f"shapes {name:12} {rows:3}x{context:<5} floor {floor(size):6.0f} us; {best}")


ONE_ROW = [
    OneRowConfig(*cut)
    for cut in (
        (2, 512, 3, 2, 1024), (2, 1024, 1, 4, 1024), (2, 1024, 1, 4, 2048), (2, 1024, 1, 4, 4096),
        (2, 2048, 1, 8, 2048),
        (4, 512, 1, 2, 1024), (4, 512, 3, 2, 1024), (4, 1024, 1, 4, 1024), (4, 1024, 1, 4, 4096), (4, 1024, 3, 4, 1024),
        (4, 2048, 1, 8, 2048), (4, 2048, 1, 8, 4096), (8, 512, 3, 4, 1024), (8, 1024, 1, 8, 1024),
        (8, 2048, 1, 8, 4096),
    )
]  # fmt: skip
FEW_ROWS = [
    LinearConfig(*cut)
    for cut in (
        (16, 512, 1, 3, 1, 128), (16, 256, 1, 4, 1, 256), (64, 128, 1, 3, 4, 64), (64, 128, 1, 2, 4, 128),
        (64, 128, 1, 4, 4, 128), (64, 64, 1, 4, 4, 128), (64, 64, 1, 6, 4, 64), (64, 128, 2, 3, 4, 64),
        (64, 128, 4, 3, 4, 16), (64, 128, 4, 3, 4, 64), (64, 128, 4, 3, 4, 256), (64, 128, 4, 4, 4, 128),
        (64, 128, 8, 3, 4, 64), (64, 128, 8, 2, 4, 128), (32, 128, 2, 6, 2, 128), (32, 128, 4, 4, 2, 128),
    )
]  # fmt: skip
DECODE_CONFIGS = [
    DecodeConfig(*cut)
    for cut in (
        (32, 3, 2, 3, 8192), (32, 3, 2, 4, 4096), (64, 3, 2, 4, 4096), (64, 2, 2, 4, 8192),
        (64, 2, 2, 4, 4096), (64, 3, 4, 2, 8192), (64, 3, 4, 3, 4096), (64, 4, 4, 2, 8192),
        (64, 5, 4, 1, 4096), (32, 4, 2, 4, 4096), (32, 3, 2, 5, 4096), (32, 5, 2, 3, 8192), (128, 3, 4, 1, 8192),
        (128, 3, 8, 1, 4096), (32, 4, 1, 4, 4096), (32, 3, 1, 6, 4096), (32, 2, 1, 8, 4096),
    )
]  # fmt: skip


def linear_cuts(n: int, k: int, rows: int) -> list[LinearConfig | OneRowConfig]:
    """Cuts worth trying: enough programs for the device, and few enough that each streams for a while."""
    if rows == 1:
        return [cut for cut in ONE_ROW if -(-n // cut.block_n) >= 60 and cut.early <= k]
    cuts = list[LinearConfig | OneRowConfig]()
    for cut in FEW_ROWS:
        programs, piece = -(-n // cut.block_n) * cut.splits, k // cut.splits
        fits = k % cut.splits == 0 and cut.early <= piece
        if fits and programs >= 60 and (cut.splits == 1 or programs <= 800):
            cuts.append(cut)
    return cuts


def compile_linear(job: tuple[int, int, int, LinearConfig | OneRowConfig | None]) -> None:
    n, k, rows, cut = job
    with contextlib.suppress(Exception):  # a cut that does not fit raises again later
        SmallLinear()(random_half(rows, k), torch.empty(n, k, device=DEVICE, dtype=torch.bfloat16), config=cut)
    torch.cuda.empty_cache()


def compile_decode(job: tuple[Heads, int, DecodeConfig | None]) -> None:
    heads, rows, cut = job
    pool = Pool(max(2048, 3 * rows), heads)
    q, lens = random_half(rows, heads.heads, heads.dim), torch.full((rows,), 32, dtype=torch.int32, device=DEVICE)
    with contextlib.suppress(Exception):  # a cut that does not fit raises again later
        PagedDecode()(q, pool.k, pool.v, pool.tables(rows, 32)[0], lens, 0.09, config=cut)
    torch.cuda.empty_cache()


def bench_tune(report: Report) -> None:
    """Coordinate descent over the cuts of a whole step. The best cut there may differ from the best one alone."""
    for name, model in MODELS.items():
        shapes = {**model.linears, "lm_head": (model.vocab, model.hidden)}
        jobs = [(n, k, rows, cut) for n, k in shapes.values() for rows in (1, 16) for cut in linear_cuts(n, k, rows)]
        precompile(compile_linear, jobs, report)
        precompile(compile_decode, [(model.heads, 1, cut) for cut in DECODE_CONFIGS], report)
        tune(name, Step(model), shapes, report)
        torch.cuda.empty_cache()


def tune(name: str, step: Step, shapes: dict[str, tuple[int, int]], report: Report) -> None:
    for rows, context in ((1, 384), (1, 32768), (16, 1024), (256, 768)):
        best: dict[str, Any] = {}
        best_us = first_us = step.time(rows, context, best)
        parts = list(shapes) if rows <= 16 else []
        for part in [*parts, "decode", *parts]:
            for cut in DECODE_CONFIGS if part == "decode" else linear_cuts(*shapes[part], rows):
                for us, _ in attempt(lambda: step.time(rows, context, {**best, part: cut}), cut):
                    case = f"{name} {rows}x{context} {part}"
                    report.add("tune", case, us, step.bytes(rows, context), variant=brief(cut))
                    if us < best_us:
                        best_us, best = us, {**best, part: cut}
        found = "; ".join(f"{part} {brief(cut)}" for part, cut in best.items())
        report.say(f"tuned {name} {rows}x{context}: {first_us:.0f} -> {best_us:.0f} us: {found}")
