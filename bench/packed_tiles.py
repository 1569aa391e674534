"""Time gpt-oss's experts on a GPU: the kernels that the engine chooses, and every config for tiles and for few rows.

    python -m bench.packed_tiles --out tiles.jsonl [--models 20b 120b] [--tokens 64 256 8] [--kinds few tiles]

A figure is a whole layer: plan, both products and the weighted sum, in a CUDA graph. The calls rotate through several
layers with their own routes by chance, so that nothing is left in the second-level cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from aengine.kernels.experts.packed.few_rows import PackedFewConfig
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.packed.rows import PackedConfig, PackedCut
from aengine.kernels.experts.products import PackedProducts
from aengine.kernels.experts.routing.plan import make_plan
from aengine.kernels.experts.rule import ExpertRule, GateClamp
from aengine.kernels.experts.triton_experts import TritonExperts
from aengine.kernels.experts.weighted_sum import weighted_sum
from aengine.kernels.linear.int4.packed_codes import BLOCK, QUARTER, TILE_ROWS
from bench.kernel_timing import DEVICE, Report, attempt, brief, floor, graph_time, random_half

HIDDEN, TOP_K = 2880, 4
EXPERTS = {"120b": 128, "20b": 32}
TOKENS = (64, 256, 8, 16, 128, 32, 4, 1)  # the most interesting first
LAYERS = 3
CALLS = 6  # of a graph
Config = PackedConfig | PackedFewConfig | None  # None: what the engine chooses
CUTS = [
    (PackedCut(*gate_up, ahead=True), PackedCut(*down, ahead=True))
    for gate_up, down in (
        ((64, 4, 4), (128, 4, 4)), ((64, 6, 4), (128, 6, 4)), ((32, 4, 4), (64, 4, 4)), ((128, 3, 8), (256, 3, 8)),
    )
]  # fmt: skip


def configs(kind: str, tokens: int, experts: int) -> list[Config]:
    if kind == "few":
        return [PackedFewConfig(column_warps) for column_warps in (1, 2, 4)]
    average = tokens * TOP_K / experts
    heights = (8, 16) if average <= 4 else (16,) if average <= 8 else (16, 32) if average <= 16 else (32, 64)
    return [PackedConfig(height, *cut) for height in heights for cut in CUTS]


def name_of(config: Config) -> str:
    """Return the height and the cuts of gate and up and of down, with the fields of each in their order."""
    if isinstance(config, PackedConfig):
        return f"tiles {config.height} {brief(config.gate_up)} {brief(config.down)}"
    return "now" if config is None else f"few {config.column_warps}"


def random_layer(experts: int) -> PackedProducts:
    """Return matrices of random codes, whose scales differ by 2 ** 3."""

    def matrices(parts: int) -> PackedMatrices:
        strips, blocks = HIDDEN // TILE_ROWS, -(-HIDDEN // BLOCK)
        count = experts * parts * strips
        words = torch.randint(-(2**15), 2**15, (count, blocks, 512), dtype=torch.int16, device=DEVICE)
        scales = torch.randint(116, 120, (blocks, count * TILE_ROWS, 4), dtype=torch.uint8, device=DEVICE)
        return PackedMatrices(words, scales.view(torch.int32)[..., 0], QUARTER, True, True, HIDDEN, HIDDEN)

    biases = random_half(experts, 2 * HIDDEN), random_half(experts, HIDDEN)
    return PackedProducts(matrices(2), matrices(1), ExpertRule(GateClamp(1.702, 7.0), biases), experts)


def run(layer: PackedProducts, config: Config, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    if config is None:
        return TritonExperts(layer).add_to(h, ids, weights, None)
    one = layer.begin(h, ids, make_plan(ids, layer.experts, config.height), config)
    return weighted_sum(one.down(one.activated()), ids, weights, None, layer.experts)


def compile_all(calls: Sequence[Callable[[], object]]) -> None:
    """Compile the kernels of these calls in many threads, without a launch."""
    real = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        real(kernel, *args, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for call in calls:
                call()
    finally:
        JITFunction.run = real


def inputs(tokens: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(tokens, experts, device=DEVICE).argsort(dim=1)[:, :TOP_K].int().contiguous()
    return random_half(tokens, HIDDEN), ids, torch.rand(tokens, TOP_K, device=DEVICE).softmax(dim=1)


def measure(model: str, layers: Sequence[PackedProducts], tokens: int, kinds: Sequence[str], report: Report) -> None:
    experts = EXPERTS[model]
    given = [inputs(tokens, experts) for _ in range(CALLS)]
    each = sum(one.words.nbytes + one.scales.nbytes for one in (layers[0].gate_up, layers[0].down)) / experts
    size = each * statistics.mean(len(ids.unique()) for _, ids, _ in given)
    tried = [None, *(config for kind in kinds for config in configs(kind, tokens, experts))]
    results: list[tuple[float, str]] = []
    for config in tried:
        calls = [partial(run, layers[call % LAYERS], config, *given[call]) for call in range(CALLS)]
        for us, _ in attempt(partial(graph_time, calls), getattr(config, "gate_up", config)):
            results.append((us, name_of(config)))
            report.add("packed", f"{model} {tokens}", us, size, variant=name_of(config))
    best = "; ".join(f"{us:.1f} {name}" for us, name in sorted(results)[:4])
    report.say(f"{model} {tokens:3} floor {floor(size):.1f}, now {results[0][0]:.1f}; {best}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(EXPERTS), default=list(EXPERTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kinds", nargs="*", choices=("few", "tiles"), default=("few", "tiles"))
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = {model: [random_layer(EXPERTS[model]) for _ in range(LAYERS)] for model in options.models}
    compile_all([
        partial(run, of_model[0], config, *inputs(tokens, of_model[0].experts))
        for of_model in layers.values() for tokens in options.tokens
        for config in (None, *(one for kind in options.kinds for one in configs(kind, tokens, of_model[0].experts)))
    ])  # fmt: skip
    with options.out.open("a") as out:
        for tokens in options.tokens:
            for model, of_model in layers.items():
                measure(model, of_model, tokens, options.kinds, Report(out))


if __name__ == "__main__":
    main()
