"""Time the Triton kernels on a GPU: `python bench/kernels.py --out results.jsonl [--sweep] [linear decode step ...]`.

Every figure is the time of one call among many in a CUDA graph, over inputs that rotate through more memory than the
second-level cache holds. `floor` is the bytes the call must move over the read bandwidth of the device.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aengine.kernels import decode_attention, gumbel, launch, norms, prefix_attention, rope, small_linear
from aengine.kernels.decode_attention import DecodeConfig, PagedDecode
from aengine.kernels.prefix_attention import PrefixConfig, SharedRuns
from aengine.kernels.small_linear import LinearConfig, SmallLinear

READ_TB_S = 4.54  # of an H200, measured
DEVICE = torch.device("cuda", 0)
LINEAR_SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
# What cuBLAS takes for one row, and FA3 for a decode: microseconds on an H200.
CUBLAS = {"qkv": 15.4, "o": 12.6, "gate_up": 50.9, "down": 29.3, "lm_head": 301.0}
FA3 = {
    (1, 1024): 11.6, (1, 8192): 18.7, (1, 32768): 44.4, (1, 131072): 142.0, (8, 4096): 42.2, (64, 1024): 79.1,
    (64, 4096): 260.0, (256, 768): 214.0, (256, 1024): 272.0, (512, 512): 285.0,
}  # fmt: skip


def graph_time(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Median microseconds per call of a graph that makes all the calls in order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


class Report:
    """JSON lines into a file, one short line each to the terminal."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def add(self, kind: str, case: str, us: float, size: float, **more: Any) -> None:
        floor = size / READ_TB_S / 1e6
        row = {
            "kind": kind,
            "case": case,
            "us": round(us, 2),
            "tb_s": round(size / us / 1e6, 3),
            "floor_us": round(floor, 2),
            **more,
        }
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()

    def say(self, text: str) -> None:
        print(text, flush=True)


# ---- linear


def linear_cuts(n: int, k: int, rows: int) -> Iterator[LinearConfig]:
    """Cuts worth trying: enough programs for the device, and few enough that each streams for a while."""
    shapes = [
        (16, 512, 3, 1, True), (32, 128, 6, 2, True), (32, 256, 4, 4, False), (64, 64, 6, 4, True), (64, 128, 3, 4, True),
        (64, 128, 4, 4, True), (128, 64, 4, 4, True), (128, 64, 6, 8, True), (128, 128, 3, 8, True), (128, 128, 2, 4, True),
    ]  # fmt: skip
    for block_n, block_k, stages, warps, first in shapes:
        for splits in (1, 2, 4, 8):
            programs = -(-n // block_n) * splits
            if 200 <= programs <= 1600 or (splits == 1 and programs > 1600):
                yield LinearConfig(block_n, block_k, splits, stages, warps, 64, first)
    if rows == 1:
        one = [(4, 1024, 3, 4), (4, 1024, 5, 4), (8, 512, 4, 4), (8, 512, 6, 4), (8, 1024, 3, 4), (16, 256, 4, 4), (16, 512, 4, 8), (2, 2048, 4, 4), (8, 512, 1, 4), (4, 1024, 1, 4)]  # fmt: skip
        for block_n, block_k, stages, warps in one:
            for splits in (1, 2, 4):
                programs = -(-n // block_n) * splits
                if (200 <= programs <= 1600 or (splits == 1 and programs > 1600)) and (k // splits) % block_k == 0:
                    yield LinearConfig(block_n, block_k, splits, stages, warps, block_k, True, True)


def linear_time(name: str, rows: int, config: LinearConfig | None, weights: list[Tensor]) -> float:
    n, k = LINEAR_SHAPES[name]
    linear = SmallLinear()
    xs = [torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16) for _ in weights]
    out = torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16)
    calls = [lambda x=x, w=w: linear(x, w, config=config, out=out) for x, w in zip(xs, weights)]
    return graph_time(calls * max(1, 24 // len(calls)))


def linear_weights(name: str) -> list[Tensor]:
    n, k = LINEAR_SHAPES[name]
    copies = max(2, min(24, int(1.2e9 / (n * k * 2))))
    return [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(copies)]


def compile_linear(job: tuple[str, int, LinearConfig | None]) -> None:
    name, rows, config = job
    n, k = LINEAR_SHAPES[name]
    weight = torch.empty(n, k, device=DEVICE, dtype=torch.bfloat16)
    try:
        SmallLinear()(torch.empty(rows, k, device=DEVICE, dtype=torch.bfloat16), weight, config=config)
    except Exception:  # noqa: BLE001 (does not fit: the sweep meets it again)
        pass
    del weight
    torch.cuda.empty_cache()


def bench_linear(report: Report, sweep: bool) -> None:
    rows_list = (32, 64) if sweep else (1, 8, 16, 32)
    jobs: list[tuple[str, int, LinearConfig | None]] = [(name, rows, None) for name in LINEAR_SHAPES for rows in (1, 16, 32)]
    if sweep:
        jobs += [(name, rows, cut) for name, (n, k) in LINEAR_SHAPES.items() for rows in rows_list for cut in linear_cuts(n, k, rows)]
    precompile(compile_linear, jobs, report)
    for name, (n, k) in LINEAR_SHAPES.items():
        weights = linear_weights(name)
        size = weights[0].numel() * 2
        for rows in rows_list:
            if True:
                xs = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
                us = graph_time([lambda w=w: F.linear(xs, w) for w in weights] * max(1, 24 // len(weights)))
                report.add("linear", f"{name} m={rows}", us, size, variant="cublas")
            results: list[tuple[float, LinearConfig | None]] = attempt(lambda: linear_time(name, rows, None, weights), None)
            if sweep:
                for cut in linear_cuts(n, k, rows):
                    results += attempt(lambda cut=cut: linear_time(name, rows, cut, weights), cut)
            for us, cut in results:
                report.add("linear", f"{name} m={rows}", us, size, variant=asdict(cut) if cut else "default")
            if not results:
                continue
            results.sort(key=lambda r: r[0])
            reference = CUBLAS.get(name, 0)
            report.say(
                f"linear {name:8} m={rows:3} floor {size / READ_TB_S / 1e6:6.1f} cublas(m=1) {reference:6.1f} "
                f"best {results[0][0]:6.1f} us {size / results[0][0] / 1e6:.2f} TB/s {brief(results[0][1])}"
            )
        del weights
        torch.cuda.empty_cache()


# ---- decode attention


@dataclass(frozen=True)
class Heads:
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


class Pool:
    """One layer's caches, and page tables that together walk through more memory than any cache holds."""

    def __init__(self, pages: int, heads: Heads, page: int = 16) -> None:
        self.page = page
        shape = (pages, page, heads.kv_heads, heads.dim)
        self.k = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        self.v = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        self.order = torch.randperm(pages - 1, device=DEVICE).to(torch.int32) + 1

    def tables(self, rows: int, context: int, most: int = 16) -> list[Tensor]:
        each = rows * -(-context // self.page)
        sets = max(1, min(most, len(self.order) // each))
        return [self.order[i * each : (i + 1) * each].view(rows, -1) for i in range(sets)]


def decode_time(pool: Pool, heads: Heads, rows: int, context: int, config: DecodeConfig | None) -> float:
    decode = PagedDecode()
    q = torch.randn(rows, heads.heads, heads.dim, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
    tables = pool.tables(rows, context)
    calls = [lambda t=t: decode(q, pool.k, pool.v, t, lens, 0.09, config=config, out=out) for t in tables]
    return graph_time(calls * max(1, 16 // len(calls)))


def compile_decode(job: tuple[Heads, int, DecodeConfig]) -> None:
    heads, rows, config = job
    pool = Pool(2048, heads)
    try:
        decode_time(pool, heads, rows, 32, config)
    except Exception:  # noqa: BLE001 (does not fit: the sweep meets it again)
        pass
    torch.cuda.empty_cache()


def bench_decode(report: Report, sweep: bool) -> None:
    for heads in (Heads(), Heads(16, 8, 128)):
        if sweep:
            precompile(compile_decode, [(heads, rows, c) for rows in (1, 256, 512) for c in DECODE_CONFIGS], report)
        pool = Pool(131072 + 1, heads)
        for (rows, context), fa3 in {**FA3, (1, 100): 0.0, (16, 300): 0.0, (512, 100): 0.0}.items():
            size = rows * context * heads.kv_heads * heads.dim * 4
            results: list[tuple[float, DecodeConfig | None]] = [(decode_time(pool, heads, rows, context, None), None)]
            for config in DECODE_CONFIGS if sweep else []:
                results += attempt(lambda config=config: decode_time(pool, heads, rows, context, config), config)
            for us, config in results:
                report.add(
                    "decode",
                    f"{heads.heads}/{heads.kv_heads} {rows}x{context}",
                    us,
                    size,
                    variant=asdict(config) if config else "default",
                )
            results.sort(key=lambda r: r[0])
            report.say(
                f"decode {heads.heads}/{heads.kv_heads} {rows:3}x{context:<6} floor {size / READ_TB_S / 1e6:6.1f} FA3 {fa3 if heads.heads == 32 else 0:6.1f} best "
                + "; ".join(f"{us:6.1f} {brief(config)}" for us, config in results[:4])
            )
        del pool
        torch.cuda.empty_cache()


# ---- a whole decode step, sampler aside


@dataclass(frozen=True)
class Model:
    layers: int = 36
    hidden: int = 4096
    inter: int = 12288
    vocab: int = 151936
    heads: Heads = Heads()

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


class Step:
    """One decode step of random weights; the cut of each linear and of the attention can be chosen."""

    def __init__(self, model: Model) -> None:
        make = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * 0.02  # noqa: E731
        self.model = model
        self.weights = [{name: make(*shape) for name, shape in model.linears.items()} for _ in range(model.layers)]
        self.lm_head, self.norm, self.head_norm = make(model.vocab, model.hidden), make(model.hidden), make(model.heads.dim)
        self.pool = Pool(65537, model.heads)
        self.cos_sin = torch.randn(65536, model.heads.dim, device=DEVICE)

    def bytes(self, rows: int, context: int) -> int:
        model = self.model
        weights = sum(n * k for n, k in model.linears.values()) * model.layers + model.vocab * model.hidden
        return weights * 2 + model.layers * rows * context * model.heads.kv_heads * model.heads.dim * 4

    def time(self, rows: int, context: int, cuts: dict[str, Any], library: str = "own", overlap: bool = True) -> float:
        """Microseconds. library: own kernels for all linears they take, cublas for none."""
        model, heads, pool = self.model, self.model.heads, self.pool
        tables = pool.tables(rows, context)
        lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        positions = torch.full((rows,), context - 1, device=DEVICE)
        slots = torch.arange(rows, device=DEVICE)
        small, decode = SmallLinear(), PagedDecode()
        x0 = torch.randn(rows, model.hidden, device=DEVICE, dtype=torch.bfloat16)

        def linear(x: Tensor, weight: Tensor, name: str) -> Tensor:
            if library != "cublas" and small.supports(x, weight):
                return small(x, weight, config=cuts.get(name))
            return F.linear(x, weight)

        def step() -> Tensor:
            residual = x = x0
            for layer, w in enumerate(self.weights):
                normed, residual = norms.add_rms_norm(x, residual, self.norm, 1e-6)
                qkv = linear(normed, w["qkv"], "qkv")
                q, _, _ = rope.qk_norm_rope_store(
                    qkv, self.head_norm, self.head_norm, 1e-6, self.cos_sin, positions, pool.k, pool.v, slots, heads.heads,
                )  # fmt: skip
                x = decode(q, pool.k, pool.v, tables[layer % len(tables)], lens, 0.09, config=cuts.get("decode"))
                x = linear(x.flatten(1), w["o"], "o")
                normed, residual = norms.add_rms_norm(x, residual, self.norm, 1e-6)
                x = norms.silu_mul(linear(normed, w["gate_up"], "gate_up"))
                x = linear(x, w["down"], "down")
            normed, _ = norms.add_rms_norm(x, residual, self.norm, 1e-6)
            return linear(normed, self.lm_head, "lm_head")

        with overlapping(overlap):
            return graph_time([step])


STEPS = ((1, 384), (1, 32768), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (256, 768))


def bench_step(report: Report, sweep: bool) -> None:
    for name, model in MODELS.items():
        step = Step(model)
        for rows, context in STEPS:
            floor = step.bytes(rows, context) / READ_TB_S / 1e6
            for library, overlap in (("own", True), ("own", False), ("cublas", True)) if rows in (1, 16, 256) else (("own", True), ("cublas", True)):
                us = step.time(rows, context, {}, library, overlap)
                report.add("step", f"{name} {rows}x{context}", us, step.bytes(rows, context), variant=library, overlap=overlap)
                report.say(
                    f"step {name:4} {rows:3}x{context:<5} {library:7} overlap {overlap!s:5} floor {floor:7.0f} {us:7.0f} us {rows / us * 1e6:8.0f} tok/s"
                )
        del step
        torch.cuda.empty_cache()
    if sweep:
        bench_tune(report, sweep)


# In the step, where each kernel may start while the last one drains, other cuts win than alone.
ONE_ROW = [
    LinearConfig(*cut, one_row=True)
    for cut in (
        (4, 1024, 1, 2, 2, 1024), (4, 1024, 1, 3, 4, 1024), (4, 1024, 1, 3, 4, 2048), (4, 1024, 1, 1, 4, 1024), (4, 512, 1, 3, 2, 1024), (4, 512, 1, 4, 2, 512), (8, 512, 1, 4, 4, 512),
        (8, 512, 1, 6, 4, 512), (8, 512, 1, 3, 4, 1024), (8, 512, 1, 4, 4, 1024), (8, 1024, 1, 3, 4, 1024), (8, 1024, 1, 2, 4, 1024), (8, 1024, 1, 3, 4, 16), (8, 512, 1, 6, 4, 16), (4, 1024, 1, 2, 2, 16),
        (2, 1024, 1, 3, 2, 1024), (8, 256, 1, 4, 2, 1024), (8, 1024, 1, 3, 8, 2048), (16, 256, 1, 4, 4, 256), (4, 1024, 1, 4, 4, 512), (8, 512, 1, 4, 4, 256),
    )
]  # fmt: skip
FEW_ROWS = [
    LinearConfig(*cut)
    for cut in (
        (16, 512, 1, 3, 1, 128), (16, 512, 1, 3, 1, 512), (16, 256, 1, 4, 1, 256), (16, 256, 1, 6, 1, 256), (64, 128, 1, 3, 4, 16), (64, 128, 1, 3, 4, 64), (64, 128, 1, 2, 4, 128), (64, 128, 1, 3, 4, 128), (64, 128, 1, 4, 4, 128),
        (64, 64, 1, 4, 4, 128), (64, 64, 1, 6, 4, 64), (64, 128, 2, 3, 4, 64), (64, 128, 4, 3, 4, 16), (64, 128, 4, 3, 4, 64), (64, 128, 4, 2, 4, 128), (64, 128, 4, 4, 4, 16), (64, 128, 4, 4, 4, 128), (64, 128, 4, 3, 4, 256),
        (64, 64, 4, 6, 4, 64), (64, 128, 8, 3, 4, 64), (64, 128, 8, 2, 4, 128), (64, 128, 16, 2, 4, 128), (32, 128, 2, 6, 2, 128), (32, 128, 4, 4, 2, 128), (32, 128, 8, 4, 2, 128), (32, 128, 1, 6, 2, 128), (32, 256, 1, 4, 4, 64, False),
    )
]  # fmt: skip
STEP_DECODE = DECODE_CONFIGS = [
    DecodeConfig(64, 3, 4, 3), DecodeConfig(64, 4, 4, 2), DecodeConfig(64, 4, 4, 2, 8192), DecodeConfig(64, 5, 4, 1), DecodeConfig(32, 4, 2, 4), DecodeConfig(32, 4, 4, 4), DecodeConfig(32, 3, 2, 5),
    DecodeConfig(32, 5, 2, 3), DecodeConfig(32, 5, 4, 3), DecodeConfig(128, 3, 8, 1), DecodeConfig(128, 3, 4, 1, 8192), DecodeConfig(64, 3, 2, 3), DecodeConfig(32, 3, 4, 5), DecodeConfig(16, 6, 2, 5), DecodeConfig(64, 3, 4, 3, 2048),
]  # fmt: skip


def step_cuts(n: int, k: int, rows: int) -> list[LinearConfig]:
    cuts = [cut for cut in (ONE_ROW if rows == 1 else []) + FEW_ROWS if k % cut.splits == 0 and (not cut.one_row or (k - cut.early) % cut.block_k == 0)]
    programs = lambda cut: -(-n // cut.block_n) * cut.splits  # noqa: E731
    cuts = [cut for cut in cuts if programs(cut) >= 60 and (cut.splits == 1 or programs(cut) <= 800)]
    return cuts


def compile_step_cut(job: tuple[int, int, int, LinearConfig]) -> None:
    n, k, rows, cut = job
    try:
        SmallLinear()(torch.empty(rows, k, device=DEVICE, dtype=torch.bfloat16), torch.empty(n, k, device=DEVICE, dtype=torch.bfloat16), config=cut)
    except Exception:  # noqa: BLE001 (does not fit: the sweep meets it again)
        pass
    torch.cuda.empty_cache()


def bench_tune(report: Report, sweep: bool) -> None:
    """Coordinate descent over the cuts of a whole step."""
    del sweep
    for name, model in MODELS.items():
        shapes = {**model.linears, "lm_head": (model.vocab, model.hidden)}
        precompile(compile_step_cut, [(n, k, rows, cut) for n, k in shapes.values() for rows in (1, 16) for cut in step_cuts(n, k, rows) if rows == 1 or not cut.one_row], report)  # fmt: skip
        precompile(compile_decode, [(model.heads, 1, c) for c in STEP_DECODE], report)
        step = Step(model)
        for rows, context in ((1, 384), (1, 32768), (16, 1024), (256, 768)) if name == "8B" else ((1, 384), (64, 1024)):
            best: dict[str, Any] = {}
            best_us = start_us = step.time(rows, context, best)
            cut_parts = ["gate_up", "down", "qkv", "o", "lm_head"] if rows <= 16 else []
            order = ["decode"] if context == 32768 else [*cut_parts, "decode", *cut_parts[:4]]
            for part in order:
                options: list[Any] = STEP_DECODE if part == "decode" else step_cuts(*shapes[part], rows)
                for cut in options:
                    for us, _ in attempt(lambda: step.time(rows, context, {**best, part: cut}), cut):
                        report.add("tune", f"{name} {rows}x{context} {part}", us, step.bytes(rows, context), variant=brief(cut))
                        if us < best_us:
                            best_us, best = us, {**best, part: cut}
            again = step.time(rows, context, best)
            report.say(
                f"tuned {name} {rows}x{context}: {start_us:.0f} -> {best_us:.0f} ({again:.0f}) us; floor {step.bytes(rows, context) / READ_TB_S / 1e6:.0f}"
            )
            for part, cut in best.items():
                report.say(f"    {part}: {brief(cut)}")
        del step
        torch.cuda.empty_cache()


def bench_launch(report: Report, sweep: bool) -> None:
    """Microseconds of host time to launch each kernel outside of a graph."""
    del sweep
    step = Step(replace(MODELS["0.6B"], layers=1))
    weights, pool, heads = step.weights[0], step.pool, step.model.heads
    x, qkv = (torch.randn(4, n, device=DEVICE, dtype=torch.bfloat16) for n in (1024, 4096))
    ints, q = torch.arange(4, device=DEVICE), torch.randn(4, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    small, decode, table, lens = SmallLinear(), PagedDecode(), pool.tables(4, 100)[0], torch.full((4,), 100, dtype=torch.int32, device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "torch linear": lambda: F.linear(x, weights["qkv"]),
        "small linear": lambda: small(x, weights["qkv"]),
        "add_rms_norm": lambda: norms.add_rms_norm(x, x, step.norm, 1e-6),
        "silu_mul": lambda: norms.silu_mul(qkv),
        "qk_norm_rope_store": lambda: rope.qk_norm_rope_store(
            qkv, step.head_norm, step.head_norm, 1e-6, step.cos_sin, ints, pool.k, pool.v, ints, heads.heads
        ),
        "decode": lambda: decode(q, pool.k, pool.v, table, lens, 0.09),
    }
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            call()
        us = (time.perf_counter() - started) * 1e6 / 200
        torch.cuda.synchronize()
        report.add("launch", name, us, 0)
        report.say(f"host time of {name}: {us:.1f} us")


class overlapping:  # noqa: N801
    """Within it, kernels are launched with or without programmatic dependent launch."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __enter__(self) -> None:
        real = launch.launch_for(DEVICE)
        for module in (small_linear, decode_attention, prefix_attention, norms, rope, gumbel):
            module.launch_for = lambda device: replace(real, overlap=self.on)  # type: ignore[attr-defined]

    def __exit__(self, *exc: object) -> None:
        for module in (small_linear, decode_attention, prefix_attention, norms, rope, gumbel):
            module.launch_for = launch.launch_for  # type: ignore[attr-defined]


def bench_small(report: Report, sweep: bool) -> None:
    """The kernels between the matrix products."""
    del sweep
    for tokens in (1, 64, 256, 8192):
        copies = 8 if tokens < 1000 else 2
        xs = [torch.randn(tokens, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        gates = [torch.randn(tokens, 24576, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        qkvs = [torch.randn(tokens, 6144, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        weight, head_weight = torch.ones(2, 4096, device=DEVICE, dtype=torch.bfloat16)
        pool = Pool(tokens // 16 + 2, Heads())
        cos_sin = torch.randn(8192, 128, device=DEVICE)
        positions = torch.arange(tokens, device=DEVICE)
        cases = {
            "add_rms_norm": ([lambda x=x: norms.add_rms_norm(x, xs[0], weight, 1e-6) for x in xs], tokens * 4096 * 8),
            "silu_mul": ([lambda g=g: norms.silu_mul(g) for g in gates], tokens * 12288 * 6),
            "qk_norm_rope_store": (
                [lambda x=x: rope.qk_norm_rope_store(x, head_weight[:128], head_weight[:128], 1e-6, cos_sin, positions, pool.k, pool.v, positions, 32) for x in qkvs],
                tokens * (6144 + 4096 + 3 * 1024) * 2,
            ),
        }  # fmt: skip
        for name, (calls, size) in cases.items():
            us = graph_time(calls * max(1, 16 // len(calls)))
            report.add(name, f"{tokens} tokens", us, size)
            report.say(f"{name:20} {tokens:5} tokens floor {size / READ_TB_S / 1e6:6.1f} {us:6.1f} us")


def bench_draw(report: Report, sweep: bool) -> None:
    """Greedy and Gumbel draws over a large vocabulary, against torch's argmax alone."""
    del sweep
    for rows in (1, 16, 64, 256, 512):
        sets = [torch.randn(rows, 151936, device=DEVICE) for _ in range(2 if rows > 100 else 8)]
        size = sets[0].numel() * 4
        draw = gumbel.Draw(rows, DEVICE)
        seeds, positions = torch.arange(rows, device=DEVICE, dtype=torch.int32), torch.arange(rows, device=DEVICE)
        for name, value in (("greedy", 0.0), ("gumbel", 0.8)):
            temperature = torch.full((rows,), value, device=DEVICE)
            us = graph_time([lambda x=x, t=temperature: draw(x, t, seeds, seeds, positions) for x in sets] * 2)
            report.add("draw", f"{name} {rows} rows", us, size)
            report.say(f"draw {name} {rows:4} rows floor {size / READ_TB_S / 1e6:6.1f} {us:6.1f} us")
        us = graph_time([lambda x=x: x.argmax(dim=1) for x in sets] * 2)
        report.add("draw", f"torch argmax {rows} rows", us, size)
        report.say(f"draw torch.argmax {rows:4} rows {us:6.1f} us")


def bench_prefix(report: Report, sweep: bool) -> None:
    """One run of pages shared by all rows, and 160 tokens of each row's own."""
    heads = Heads()
    pool = Pool(40001, heads)
    configs = [None, PrefixConfig(64, 64, 3, 4, 2), PrefixConfig(128, 32, 4, 8, 1)]
    for rows, shared in ((2, 4096), (16, 4096), (64, 4096), (256, 4096), (256, 1024)):
        own, pages = 160, shared // 16
        table = torch.cat((pool.order[:pages].expand(rows, pages), pool.order[pages : pages + rows * own // 16].view(rows, -1)), 1).contiguous()
        ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
        runs = SharedRuns(ints(*range(rows)), ints(0, *([rows] * 8)), ints(shared, *([0] * 7)), ints(*([shared] * rows)))
        lens = ints(*([shared + own] * rows))
        q = torch.randn(rows, heads.heads, heads.dim, device=DEVICE, dtype=torch.bfloat16)
        decode, prefix = PagedDecode(), prefix_attention.attend_shared
        alone = graph_time([lambda: decode(q, pool.k, pool.v, table, lens, 0.09)] * 8)
        report.add("prefix", f"{rows}x({shared}+{own})", alone, rows * (shared + own) * 4096, variant="unshared")
        results = []
        part = prefix(q, pool.k, pool.v, table, runs, 0.09)
        own_only = []
        for cut in STEP_DECODE if sweep and rows > 2 else []:
            own_only += attempt(lambda cut=cut: graph_time([lambda: decode(q, pool.k, pool.v, table, lens, 0.09, shared=part, config=cut)] * 8), cut)
            report.add("own", f"{rows}x({shared}+{own})", own_only[-1][0], rows * own * 4096, variant=brief(cut))
        report.say("own pages alone: " + "; ".join(f"{us:.1f} {brief(cut)}" for us, cut in sorted(own_only, key=lambda r: r[0])[:4]))
        for config in configs if sweep else configs[:1]:

            def both(config: PrefixConfig | None = config) -> None:
                decode(q, pool.k, pool.v, table, lens, 0.09, shared=prefix(q, pool.k, pool.v, table, runs, 0.09, config))

            results += attempt(lambda: graph_time([both] * 8), config)
            results_prefix = graph_time([lambda config=config: prefix(q, pool.k, pool.v, table, runs, 0.09, config)] * 8)
            report.add("prefix", f"{rows}x({shared}+{own})", results_prefix, shared * 4096, variant="run only " + brief(config))
        for us, config in results:
            report.add("prefix", f"{rows}x({shared}+{own})", us, (shared + rows * own) * 4096, variant=brief(config))
        report.say(f"prefix {rows}x({shared}+{own}) alone {alone:6.1f} shared " + "; ".join(f"{us:6.1f} {brief(c)}" for us, c in results))


# ---- plumbing


def attempt(measure: Callable[[], float], config: Any) -> list[tuple[float, Any]]:
    try:
        return [(measure(), config)]
    except Exception as error:  # noqa: BLE001 (too much shared memory, most of all)
        print("failed", brief(config), repr(error)[:120], flush=True)
        return []


def brief(config: Any) -> str:
    return "default" if config is None else str(config) if isinstance(config, float) else "/".join(str(int(v)) for v in asdict(config).values())


def precompile(function: Callable[[Any], None], jobs: list[Any], report: Report) -> None:
    """Fill Triton's cache on disk from many processes: compiling is most of a sweep's time."""
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(14, mp_context=context) as pool:
        list(pool.map(function, jobs, chunksize=4))
    report.say(f"compiled {len(jobs)} variants in {time.monotonic() - started:.0f} s")


BENCHES = {"tune": bench_tune, "launch": bench_launch, 
    "linear": bench_linear,
    "decode": bench_decode,
    "step": bench_step,
    "small": bench_small,
    "draw": bench_draw,
    "prefix": bench_prefix,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=list(BENCHES), help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="try many configurations")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with arguments.out.open("a") as out:
        for name in arguments.what:
            started = time.monotonic()
            try:
                BENCHES[name](Report(out), arguments.sweep)
            except Exception:  # noqa: BLE001 (the others are still worth their time)
                traceback.print_exc()
            print(f"-- {name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
