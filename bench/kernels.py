"""Time the Triton kernels on a GPU.

    python -m bench.kernels --out results.jsonl [--sweep] [linear decode step shapes small draw cutoff extras ngram ...]

Every figure is the time of one call among many in a CUDA graph, over inputs that rotate through more memory than the
second-level cache holds. `floor` is the bytes that the call must move over the read bandwidth of the device.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels import elementwise
from aengine.kernels.attention.config import DecodeConfig
from aengine.kernels.attention.decode_attention import PagedDecode
from aengine.kernels.attention.heads import Heads as QueryHeads
from aengine.kernels.attention.inputs import qk_norm_rope_store
from aengine.kernels.attention.prefix_attention import PrefixConfig, SharedRuns, attend_shared
from aengine.kernels.draw import gumbel
from aengine.kernels.draw.cutoff import Cutoff
from aengine.kernels.draw.likeliest import likeliest
from aengine.kernels.draw.penalties import penalize_seen
from aengine.kernels.linear.one_row import OneRowConfig
from aengine.kernels.linear.small_linear import LinearConfig, SmallLinear
from aengine.kernels.ngram import triton_ngram
from bench.adapter_layers import bench_adapters
from bench.draft_attention import bench_draft_attention
from bench.kernel_step import (
    DECODE_CONFIGS,
    MODELS,
    Step,
    bench_shapes,
    bench_step,
    compile_decode,
    compile_linear,
    linear_cuts,
)
from bench.kernel_timing import DEVICE, Heads, Pool, Report, attempt, brief, floor, graph_time, precompile, random_half
from bench.mixture_step import bench_mixture
from bench.routers import bench_routers

LINEAR_SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
# Rows x context, and what FA3 takes for it on an H200, in microseconds.
DECODES = {
    (1, 1024): 11.6, (1, 8192): 18.7, (1, 32768): 44.4, (1, 131072): 142.0, (8, 4096): 42.2, (64, 1024): 79.1,
    (64, 4096): 260.0, (256, 768): 214.0, (256, 1024): 272.0, (512, 512): 285.0,
    (1, 100): None, (16, 300): None, (512, 100): None,
}  # fmt: skip


def linear_time(rows: int, config: LinearConfig | OneRowConfig | None, weights: list[Tensor]) -> float:
    linear = SmallLinear()
    xs = [random_half(rows, weights[0].shape[1]) for _ in weights]
    calls = [lambda x=x, w=w: linear(x, w, config=config) for x, w in zip(xs, weights)]
    return graph_time(calls * max(1, 24 // len(calls)))


def bench_linear(report: Report, sweep: bool) -> None:
    cases = [(name, n, k, rows) for name, (n, k) in LINEAR_SHAPES.items() for rows in (1, 8, 16, 32)]
    jobs: list[Any] = [(n, k, rows, None) for _, n, k, rows in cases]
    if sweep:
        jobs += [(n, k, rows, cut) for _, n, k, rows in cases for cut in linear_cuts(n, k, rows)]
    precompile(compile_linear, jobs, report)
    for name, n, k, rows in cases:
        size = n * k * 2
        weights = [random_half(n, k, scale=0.02) for _ in range(max(2, min(24, int(1.2e9 / size))))]
        x = random_half(rows, k)
        library = graph_time([lambda w=w: F.linear(x, w) for w in weights] * max(1, 24 // len(weights)))
        report.add("linear", f"{name} m={rows}", library, size, variant="cublas")
        results = attempt(lambda: linear_time(rows, None, weights), None)
        for cut in linear_cuts(n, k, rows) if sweep else []:
            results += attempt(lambda cut=cut: linear_time(rows, cut, weights), cut)
        for us, cut in results:
            report.add("linear", f"{name} m={rows}", us, size, variant=brief(cut))
        best = "; ".join(f"{us:.1f} {brief(cut)}" for us, cut in sorted(results, key=lambda result: result[0])[:3])
        report.say(f"linear {name:8} m={rows:3} floor {floor(size):6.1f} cuBLAS {library:6.1f} us; {best}")
        torch.cuda.empty_cache()


def decode_time(pool: Pool, heads: Heads, rows: int, context: int, config: DecodeConfig | None) -> float:
    decode, q = PagedDecode(), random_half(rows, heads.heads, heads.dim)
    out = torch.empty_like(q)
    lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
    tables = pool.tables(rows, context)
    calls = [lambda t=t: decode(q, pool.k, pool.v, t, lens, 0.09, config=config, out=out) for t in tables]
    return graph_time(calls * max(1, 16 // len(calls)))


def bench_decode(report: Report, sweep: bool) -> None:
    for heads in (Heads(), Heads(32, 4, 128), Heads(16, 8, 128), Heads(32, 8, 64)):
        configs = [None, *DECODE_CONFIGS] if sweep else [None]
        precompile(compile_decode, [(heads, rows, cut) for rows in (1, 16, 256, 512) for cut in configs], report)
        pool = Pool(131073, heads)
        for (rows, context), fa3 in DECODES.items():
            size = rows * context * heads.kv_heads * heads.dim * 4
            case = f"{heads.heads}/{heads.kv_heads}/{heads.dim} {rows}x{context}"
            results = []
            for config in configs:
                results += attempt(lambda config=config: decode_time(pool, heads, rows, context, config), config)
            for us, config in results:
                report.add("decode", case, us, size, variant=brief(config), fa3=fa3 if heads == Heads() else None)
            best = "; ".join(f"{us:.1f} {brief(cut)}" for us, cut in sorted(results, key=lambda result: result[0])[:4])
            report.say(f"decode {case:18} floor {floor(size):6.1f} FA3 {fa3} us; {best}")
        torch.cuda.empty_cache()


def bench_small(report: Report, sweep: bool) -> None:
    """The kernels between the matrix products."""
    head_weight = random_half(128)
    cos_sin = torch.randn(8192, 128, device=DEVICE)
    cut = QueryHeads(32, head_weight, head_weight, 1e-6)
    for tokens in (1, 64, 256, 8192):
        copies = 8 if tokens < 1000 else 2
        gates, qkvs = ([random_half(tokens, n) for _ in range(copies)] for n in (24576, 6144))
        pool, places = Pool(tokens // 16 + 2, Heads()), torch.arange(tokens, device=DEVICE)
        cases: dict[str, tuple[list[Callable[[], object]], int]] = {
            "silu_mul": ([lambda g=g: elementwise.silu_mul(g) for g in gates], 12288 * 6),
            "qk_norm_rope_store": (
                [lambda x=x: qk_norm_rope_store(x, cut, cos_sin, places, (pool.k, pool.v), places) for x in qkvs],
                (6144 + 4096 + 3 * 1024) * 2,
            ),
        }
        for name, (calls, bytes_each) in cases.items():
            us = graph_time(calls * max(1, 16 // len(calls)))
            report.add(name, f"{tokens} tokens", us, tokens * bytes_each)
            report.say(f"{name:20} {tokens:5} tokens floor {floor(tokens * bytes_each):6.1f} {us:6.1f} us")


def bench_draw(report: Report, sweep: bool) -> None:
    """Greedy and Gumbel draws over a large vocabulary, against torch's argmax alone."""
    for rows in (1, 16, 64, 256, 512):
        sets = [torch.randn(rows, 151936, device=DEVICE) for _ in range(2 if rows > 100 else 8)]
        size = sets[0].numel() * 4
        draw, numbers = gumbel.Draw(rows, DEVICE), torch.arange(rows, device=DEVICE)
        seeds, greedy = numbers.int(), torch.zeros(rows, device=DEVICE)
        cases: dict[str, Callable[[Tensor], object]] = {
            "greedy": lambda x: draw(x, greedy, seeds, seeds, numbers, numbers),
            "gumbel": lambda x: draw(x, greedy + 0.8, seeds, seeds, numbers, numbers),
            "torch argmax": lambda x: x.argmax(dim=1),
        }
        for name, call in cases.items():
            us = graph_time([lambda x=x: call(x) for x in sets] * 2)
            report.add("draw", f"{name} {rows} rows", us, size)
            report.say(f"draw {name:12} {rows:4} rows floor {floor(size):6.1f} {us:6.1f} us")


def bench_cutoff(report: Report, sweep: bool) -> None:
    """Compare the kernel that finds the last kept token with a sort, and time a draw that uses it.

    Flat rows keep some 10,000 tokens at a top_p of 0.95, peaked rows a few.
    """
    vocab = 151936
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 32, 256):
            copies = max(2, min(16, int(6e7 / (rows * vocab))))
            flat = [(torch.randn(rows, vocab, device=DEVICE) * 3).to(dtype) for _ in range(copies)]
            peaked = [x.clone() for x in flat]
            for x in peaked:
                x[:, :100] += torch.linspace(15, 5, 100, device=DEVICE).to(dtype)
            size = rows * vocab * dtype.itemsize
            cut, draw, numbers = Cutoff(rows, DEVICE), gumbel.Draw(rows, DEVICE), torch.arange(rows, device=DEVICE)
            seeds, ones = numbers.int(), torch.ones(rows, device=DEVICE)
            off = {"top_k": seeds * 0 + vocab, "top_p": ones * 2, "log_min_p": ones * -torch.inf}
            k, p = {"top_k": seeds * 0 + 50}, {"top_p": ones * 0.95}
            filters = {"none": off, "top_k 50": {**off, **k}, "top_p 0.95": {**off, **p}, "both": {**off, **k, **p}}
            cases: dict[str, Callable[[Tensor], object]] = {
                name: lambda x, f=f: cut(x, ones, **f) for name, f in filters.items()
            }
            cases["both, and draw"] = lambda x: draw(
                x, ones, seeds, seeds, numbers, numbers, cut(x, ones, **filters["both"])
            )
            cases["torch.topk 50"] = lambda x: x.topk(50)
            cases["torch.sort"] = lambda x: x.sort(dim=1, descending=True)
            for name, call in cases.items():
                for shape, sets in (("flat", flat), ("peaked", peaked)):
                    us = graph_time([lambda x=x: call(x) for x in sets], replays=5)
                    case = f"{str(dtype).removeprefix('torch.')} {rows} rows, {name}, {shape}"
                    report.add("cutoff", case, us, size)
                    report.say(f"cutoff {case:44} floor {floor(size):6.1f} {us:8.1f} us")
            torch.cuda.empty_cache()


def bench_extras(report: Report, sweep: bool) -> None:
    """Penalties (768 tokens seen) and logprobs, against torch's topk."""
    vocab = 151936
    for rows in (1, 32, 256):
        sets = [random_half(rows, vocab, scale=3.0) for _ in range(2 if rows > 100 else 8)]
        wide = [x.float() for x in sets]
        cells = torch.zeros(rows, vocab, dtype=torch.int32, device=DEVICE)
        cells.scatter_(1, torch.randint(vocab, (rows, 768), device=DEVICE), 2)
        numbers, ones = torch.arange(rows, device=DEVICE), torch.ones(rows, device=DEVICE)
        cases: dict[str, tuple[list[Tensor], int, Callable[[Tensor], object]]] = {
            "penalties": (wide, 4, lambda x: penalize_seen(x, numbers, numbers, cells, ones * 1.1, ones, ones)),
            "logprobs 0": (sets, 2, lambda x: likeliest(x, numbers, numbers, 0)),
            "logprobs 5": (sets, 2, lambda x: likeliest(x, numbers, numbers, 5)),
            "logprobs 20": (sets, 2, lambda x: likeliest(x, numbers, numbers, 20)),
            "torch log_softmax, topk 20": (wide, 4, lambda x: x.log_softmax(dim=1).topk(20)),
        }
        for name, (inputs, width, call) in cases.items():
            us = graph_time([lambda x=x: call(x) for x in inputs] * 2)
            report.add("extras", f"{name} {rows} rows", us, rows * vocab * width)
            report.say(f"{name:26} {rows:4} rows floor {floor(rows * vocab * width):6.1f} {us:7.1f} us")


def bench_prefix(report: Report, sweep: bool) -> None:
    """One run of pages shared by all rows, and 160 tokens of each row's own."""
    heads, own = Heads(), 160
    pool = Pool(40001, heads)
    configs = [None, PrefixConfig(64, 64, 3, 4, 2), PrefixConfig(128, 64, 3, 8, 1)]
    for rows, length in ((2, 4096), (16, 4096), (64, 4096), (256, 4096), (256, 1024)):
        pages = length // 16
        shared = pool.order[:pages].expand(rows, pages)
        table = torch.cat((shared, pool.order[pages : pages + rows * own // 16].view(rows, -1)), 1).contiguous()
        ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
        runs = SharedRuns(
            ints(*range(rows)), ints(0, *([rows] * 8)), ints(length, *([0] * 7)), ints(*([length] * rows))
        )
        q, lens = random_half(rows, heads.heads, heads.dim), ints(*([length + own] * rows))
        decode, where = PagedDecode(), (pool.k, pool.v, table)
        part = attend_shared(q, *where, runs, 0.09)
        cases: dict[str, Callable[[], object]] = {
            "unshared": lambda: decode(q, *where, lens, 0.09),
            "own pages": lambda: decode(q, *where, lens, 0.09, shared=part),
        }
        for config in configs if sweep else [None]:
            cases[f"run {brief(config)}"] = lambda config=config: attend_shared(q, *where, runs, 0.09, config)
        for cut in DECODE_CONFIGS if sweep else []:
            cases[f"own pages {brief(cut)}"] = lambda cut=cut: decode(q, *where, lens, 0.09, shared=part, config=cut)
        cases["both"] = lambda: decode(q, *where, lens, 0.09, shared=attend_shared(q, *where, runs, 0.09))
        for name, call in cases.items():
            us = graph_time([call] * 8)
            report.add("prefix", f"{rows}x({length}+{own})", us, (length + rows * own) * 4096, variant=name)
            report.say(f"prefix {rows:3}x({length}+{own}) {name:24} {us:6.1f} us")


def bench_launch(report: Report, sweep: bool) -> None:
    """Microseconds of host time to launch each kernel outside of a graph."""
    step = Step(replace(MODELS["0.6B"], layers=1))
    weights, pool, heads = step.weights[0], step.pools[0], step.model.heads
    x, qkv, q = random_half(4, 1024), random_half(4, 4096), random_half(4, 16, 128)
    numbers, lens = torch.arange(4, device=DEVICE), torch.full((4,), 100, dtype=torch.int32, device=DEVICE)
    small, decode, table = SmallLinear(), PagedDecode(), pool.tables(4, 100)[0]
    cut = QueryHeads(heads.heads, step.head_norm, step.head_norm, 1e-6)
    calls: dict[str, Callable[[], object]] = {
        "torch linear": lambda: F.linear(x, weights["qkv"]),
        "small linear": lambda: small(x, weights["qkv"]),
        "silu_mul": lambda: elementwise.silu_mul(qkv),
        "qk_norm_rope_store": lambda: qk_norm_rope_store(qkv, cut, step.cos_sin, numbers, (pool.k, pool.v), numbers),
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


def bench_ngram(report: Report, sweep: bool) -> None:
    """Five n-gram drafts, and their append. The histories stay in the second-level cache."""
    for rows, context in ((1, 2048), (1, 32768), (1, 131072), (16, 32768), (64, 8192), (256, 2048), (256, 32768)):
        capacity = max(context, 40960)
        history = torch.randint(50000, (rows, capacity), dtype=torch.int32, device=DEVICE)
        recurring = (torch.arange(capacity, dtype=torch.int32, device=DEVICE) % 700).repeat(rows, 1)
        lengths, index = torch.full((rows,), context, device=DEVICE), torch.arange(rows, device=DEVICE)
        new, counts = torch.zeros(rows, 6, dtype=torch.int64, device=DEVICE), torch.full((rows,), 3, device=DEVICE)
        cases: dict[str, tuple[Callable[[], object], int]] = {
            "random": (lambda: triton_ngram.match(history, lengths, index, 8, 2, 5), 4 * rows * context),
            "recurring": (lambda: triton_ngram.match(recurring, lengths, index, 8, 2, 5), 4 * rows * context),
            "append": (lambda: triton_ngram.append(history, lengths, index, new, counts), 0),
        }
        for name, (call, size) in cases.items():
            us = graph_time([call] * 16)
            report.add("ngram", f"{name} {rows}x{context}", us, size)
            report.say(f"ngram {name:9} {rows:3}x{context:<6} floor {floor(size):6.1f} {us:6.1f} us")


BENCHES = {
    "linear": bench_linear,
    "decode": bench_decode,
    "drafts": bench_draft_attention,
    "step": bench_step,
    "shapes": bench_shapes,
    "small": bench_small,
    "draw": bench_draw,
    "cutoff": bench_cutoff,
    "extras": bench_extras,
    "ngram": bench_ngram,
    "prefix": bench_prefix,
    "launch": bench_launch,
    "mixture": bench_mixture,
    "routers": bench_routers,
    "adapters": bench_adapters,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(BENCHES), choices=list(BENCHES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="try many configurations, and tune a whole step")
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
