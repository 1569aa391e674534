"""Time tiles of MXFP4 experts on a GPU: what runs, other configs of it, and the candidate, in turns on one board.

    python -m bench.packed_tiles --out tiles.jsonl [--models 20b 120b] [--tokens 64 256 8] [--kinds tiles streamed]

A figure is a whole layer: plan, both products and the weighted sum, in a CUDA graph. The calls rotate through several
layers with their own routes by chance, so that nothing is left in the second-level cache. Each result is compared with
a product in float32. Lines of JSON have microseconds, the bytes of the chosen experts and their share of 4.54 TB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.packed.rows import PackedConfig, PackedCut, PackedPass
from aengine.kernels.experts.products import PackedProducts
from aengine.kernels.experts.routing.plan import make_plan
from aengine.kernels.experts.rule import ExpertRule, GateClamp
from aengine.kernels.experts.triton_experts import TritonExperts
from aengine.kernels.experts.weighted_sum import weighted_sum
from aengine.kernels.linear.int4.packed_codes import BLOCK, QUARTER, TILE_ROWS
from bench.kernel_timing import DEVICE, READ_TB_S, brief
from bench.packed_candidates import StreamedConfig, StreamedCut, streamed_tiles

HIDDEN, TOP_K = 2880, 4
EXPERTS = {"120b": 128, "20b": 32}
TOKENS = (64, 256, 8, 16, 128, 32, 4, 1)  # the most interesting first
LAYERS = 3
CALLS = 6  # of a graph
ROUNDS = 5
MOST_ERROR = 5e-3
KINDS = ("tiles", "streamed")  # other configs of what runs, and the candidate
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Variant = PackedConfig | StreamedConfig | None  # None: what the engine chooses


@dataclass(frozen=True)
class Layer:
    gate_up: PackedMatrices
    down: PackedMatrices
    rule: ExpertRule
    experts: int

    def run(self, variant: Variant, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if variant is None:
            products = PackedProducts(self.gate_up, self.down, self.rule, self.experts)
            return TritonExperts(products).add_to(h, ids, weights, None)
        plan = make_plan(ids, self.experts, variant.height)
        if isinstance(variant, PackedConfig):
            one = PackedPass(h, ids, plan, self.gate_up, self.down, variant, self.rule)
            rows = one.down(one.activated())
        else:
            rows = streamed_tiles(h, plan, ids.shape[1], self.gate_up, self.down, variant, self.rule)
        return weighted_sum(rows, ids, weights, None, self.experts)

    def reference(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute in float32, expert by expert."""
        total = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
        for expert in ids.unique().tolist():
            token, j = (ids == expert).nonzero(as_tuple=True)
            gate_up = dequantised(self.gate_up, expert, parts=2)
            gate, up = F.linear(h[token].float(), gate_up).chunk(2, dim=-1)
            if self.rule.biases is not None:
                of_gate, of_up = self.rule.biases[0][expert].float().chunk(2)
                gate, up = gate + of_gate, up + of_up
            inner = F.silu(gate) * up if self.rule.clamp is None else self.rule.clamp(gate, up)
            rows = F.linear(inner, dequantised(self.down, expert, parts=1))
            if self.rule.biases is not None:
                rows += self.rule.biases[1][expert].float()
            total.index_add_(0, token, weights[token, j, None] * rows)
        return total


def dequantised(matrices: PackedMatrices, expert: int, parts: int) -> Tensor:
    """Return one expert's matrix in float32, [parts * rows, columns]."""
    strips = -(-matrices.rows // TILE_ROWS)
    own = slice(expert * parts * strips, (expert + 1) * parts * strips)
    # strip, block, half, r, t, eight of rows, eight of words, pair
    words = matrices.words[own].int().view(parts * strips, -1, 2, 8, 4, 2, 2, 2)
    words = words.permute(0, 5, 3, 1, 2, 6, 4, 7).reshape(parts * strips * TILE_ROWS, -1, QUARTER)
    sizes = torch.tensor(MAGNITUDES, device=words.device)
    scales = matrices.scales[:, own.start * TILE_ROWS : own.stop * TILE_ROWS].t()  # [rows, blocks]
    quarters = []
    for quarter in range(4):
        size = (words >> 13 & 1 | words >> 9 & 6) if quarter == 3 else words >> 3 * quarter & 7
        sign = 1 - 2 * (words >> (14 if quarter == 3 else 9 + 3 * quarter) & 1)
        power = torch.exp2(((scales >> 8 * quarter & 255) - 127).float())
        quarters.append(sizes[size] * sign * power[..., None])
    whole = torch.stack(quarters, dim=2).view(parts, strips * TILE_ROWS, -1)
    return whole[:, : matrices.rows, : matrices.columns].reshape(parts * matrices.rows, -1)


def random_layer(experts: int) -> Layer:
    """Return matrices of random codes, whose scales differ by 2 ** 3."""

    def matrices(parts: int) -> PackedMatrices:
        strips, blocks = HIDDEN // TILE_ROWS, -(-HIDDEN // BLOCK)
        count = experts * parts * strips
        words = torch.randint(-(2**15), 2**15, (count, blocks, 512), dtype=torch.int16, device=DEVICE)
        scales = torch.randint(116, 120, (blocks, count * TILE_ROWS, 4), dtype=torch.uint8, device=DEVICE)
        return PackedMatrices(words, scales.view(torch.int32)[..., 0], QUARTER, True, True, HIDDEN, HIDDEN)

    biases = (
        torch.randn(experts, 2 * HIDDEN, device=DEVICE, dtype=torch.bfloat16),
        torch.randn(experts, HIDDEN, device=DEVICE, dtype=torch.bfloat16),
    )
    return Layer(matrices(2), matrices(1), ExpertRule(GateClamp(1.702, 7.0), biases), experts)


def variants(tokens: int, experts: int, kinds: Sequence[str] = KINDS) -> list[Variant]:
    """Return what is tried for a number of tokens; first what runs."""
    average = tokens * TOP_K / experts
    tried: list[Variant] = [None]
    heights = (8, 16) if average <= 4 else (16,) if average <= 8 else (16, 32) if average <= 16 else (32, 64)
    for height in heights:
        for gate_up, down in (
            ((64, 4, 4), (128, 4, 4)), ((64, 6, 4), (128, 6, 4)), ((32, 4, 4), (64, 4, 4)),
            ((128, 3, 8), (256, 3, 8)),
        ):  # fmt: skip
            tried.append(PackedConfig(height, PackedCut(*gate_up, ahead=True), PackedCut(*down, ahead=True)))
    groups = (1,) if average <= 2 else (1, 2) if average <= 4 else (2, 3) if average <= 8 else (3, 4)
    cuts = (
        (StreamedCut(1, 4), StreamedCut(2, 4)),
        (StreamedCut(1, 2, 2), StreamedCut(2, 2, 2)),
        (StreamedCut(1, 1, 4), StreamedCut(2, 1, 4)),
        (StreamedCut(2, 4), StreamedCut(3, 4)),
    )
    # With four eights, the last cut spills registers.
    tried += [StreamedConfig(group, *cut) for group in groups for cut in (cuts[:-1] if group == 4 else cuts)]
    return [one for one in tried if one is None or name_of(one).startswith(tuple(kinds))]


def compile_all(calls: Sequence[Callable[[], object]]) -> None:
    """Compile the kernels of these calls in many threads, without a launch."""
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for call in calls:
                call()
    finally:
        JITFunction.run = run


def captured(layers: Sequence[Layer], variant: Variant, inputs: Sequence[tuple[Tensor, ...]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layers[0].run(variant, *inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            layers[call % len(layers)].run(variant, *inputs[call])
    graph.replay()
    return graph


def measure(model: str, layers: Sequence[Layer], tokens: int, kinds: Sequence[str], out: TextIO) -> None:
    experts = EXPERTS[model]
    inputs = [
        (
            torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16),
            torch.rand(tokens, experts, device=DEVICE).argsort(dim=1)[:, :TOP_K].int().contiguous(),
            torch.rand(tokens, TOP_K, device=DEVICE).softmax(dim=1),
        )
        for _ in range(CALLS)
    ]
    each = sum(matrices.words.nbytes + matrices.scales.nbytes for matrices in (layers[0].gate_up, layers[0].down))
    size = each / experts * statistics.mean(len(ids.unique()) for _, ids, _ in inputs)
    expected = layers[0].reference(*inputs[0])
    graphs: dict[Variant, torch.cuda.CUDAGraph] = {}
    errors: dict[Variant, float] = {}
    for variant in variants(tokens, experts, kinds):
        try:
            result = layers[0].run(variant, *inputs[0])
            errors[variant] = float((result.float() - expected).norm() / expected.norm())
            graphs[variant] = captured(layers, variant, inputs)
        except Exception as error:  # noqa: BLE001 (too much shared memory, most of all)
            print("failed", name_of(variant), repr(error)[:160], flush=True)
    times: dict[Variant, list[float]] = {variant: [] for variant in graphs}
    for _ in range(ROUNDS):
        for variant, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[variant].append(start.elapsed_time(end) * 1e3 / CALLS)
    lines = []
    for variant, each_time in times.items():
        us, error = statistics.median(each_time), errors[variant]
        line = {"model": model, "tokens": tokens, "variant": name_of(variant), "us": round(us, 1)} | {
            "bytes": int(size), "share": round(size / READ_TB_S / 1e6 / us, 3), "error": round(error, 5),
            "right": error < MOST_ERROR,  # NaN is wrong
        }  # fmt: skip
        out.write(json.dumps(line) + "\n")
        lines.append((us, line))
    out.flush()
    best = [line for _, line in sorted(lines, key=lambda pair: pair[0]) if line["right"]][:4]
    now = next(line for _, line in lines if line["variant"] == "now")
    wrong = [line["variant"] for _, line in lines if not line["right"]]
    print(f"{model} {tokens:3} floor {size / READ_TB_S / 1e6:6.1f} now {now['us']:6.1f}; "
          + "; ".join(f"{line['us']:.1f} {line['variant']}" for line in best), *(["WRONG", *wrong] if wrong else []),
          flush=True)  # fmt: skip


def name_of(variant: Variant) -> str:
    """Return groups or height, gate and up, down, with the fields of each cut in their order."""
    if variant is None:
        return "now"
    kind, size = ("tiles", variant.height) if isinstance(variant, PackedConfig) else ("streamed", variant.groups)
    return f"{kind} {size} {brief(variant.gate_up)} {brief(variant.down)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(EXPERTS), default=list(EXPERTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="timed beside what runs")
    parser.add_argument("--seconds", type=float, default=110.0, help="begin no case after this")
    options = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    layers = {model: [random_layer(EXPERTS[model]) for _ in range(LAYERS)] for model in options.models}
    compile_all([
        lambda layer=of_model[0], variant=variant, tokens=tokens: layer.run(
            variant, torch.empty(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16),
            torch.empty(tokens, TOP_K, device=DEVICE, dtype=torch.int32), torch.empty(tokens, TOP_K, device=DEVICE),
        )
        for of_model in layers.values() for tokens in options.tokens
        for variant in variants(tokens, of_model[0].experts, options.kinds)
    ])  # fmt: skip
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    with options.out.open("a") as out:
        for tokens in options.tokens:
            for model, of_model in layers.items():
                if time.monotonic() - started < options.seconds:
                    measure(model, of_model, tokens, options.kinds, out)
    print(f"done after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
