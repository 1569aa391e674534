"""Times norm, router, choice and plan of many layers in a graph: the kernels between attention and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from aengine.kernels.elementwise import TritonNorm
from aengine.kernels.experts.routing.plan import make_plan
from aengine.kernels.experts.routing.route import Route, RouteConfig
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.launch import power_of_two
from bench.kernel_timing import DEVICE, Report, attempt, brief, graph_time, random_half

LAYERS = 12
TOKENS = (8, 64, 128, 256, 512, 1024, 2048, 8192, 16384)
SPLIT_TOKENS = 512  # up to here a sweep varies the cut of columns, beyond it varies tiles


@dataclass(frozen=True)
class Shape:
    experts: int
    hidden: int
    router: Router


SHAPES = {
    "30B-A3B": Shape(128, 2048, Router(8, "softmax", True)),
    "35B-A3B": Shape(256, 2048, Router(8, "softmax", True)),
    "gpt-oss": Shape(32, 2880, Router(4, "softmax_of_chosen")),
    "OLMoE": Shape(64, 2048, Router(8, "softmax")),
    "512 experts": Shape(512, 2048, Router(10, "softmax", True)),
    "Kimi K2": Shape(384, 7168, Router(8, "sigmoid", True, scale=2.827)),
    "DeepSeek-V3": Shape(256, 7168, Router(8, "sigmoid", True, 8, 4, "top2", 2.5)),
}


def bench_routers(report: Report, sweep: bool) -> None:
    for name, shape in SHAPES.items():
        chain = _chain(shape)
        for tokens in TOKENS:
            cuts = [None, *_cuts(shape, tokens)] if sweep else [None]
            found = [pair for cut in cuts for pair in attempt(lambda cut=cut: chain(tokens, cut), cut)]
            for us, cut in found:
                report.add("routers", f"{name} {tokens}", us, 0, variant=brief(cut))
            best = "; ".join(f"{us:.1f} {brief(cut)}" for us, cut in sorted(found, key=lambda pair: pair[0])[:4])
            report.say(f"router {name:11} {tokens:5} tokens: {best} us a layer")


def _chain(shape: Shape) -> Callable[[int, RouteConfig | None], float]:
    """Return microseconds for a layer. cut: of the router; None means the one that the engine uses."""
    route, norm = Route(), TritonNorm(random_half(shape.hidden), 1e-6)
    weights = [random_half(shape.experts, shape.hidden) for _ in range(LAYERS)]

    def chain(tokens: int, cut: RouteConfig | None) -> float:
        x, slots = random_half(tokens, shape.hidden), torch.arange(tokens, device=DEVICE) + 16

        def layers() -> None:
            for weight in weights:
                ids, _ = route(norm(x), weight, shape.router, slots=slots, first_slot=16, config=cut)
                make_plan(ids, shape.experts, 32 if tokens <= 256 else 128)

        return graph_time([layers]) / LAYERS

    return chain


def _cuts(shape: Shape, tokens: int) -> Iterator[RouteConfig]:
    padded = max(16, power_of_two(shape.experts))
    for height in (16, 32) if tokens <= SPLIT_TOKENS else (16, 32, 64, 128):
        for warps in (4, 8):
            if tokens > SPLIT_TOKENS:
                yield from (RouteConfig(height, 64, 1, stages, warps) for stages in (3, 4, 5))
            else:
                pieces = (count for count in range(1, 33) if shape.hidden % (8 * count) == 0)
                blocks = ((count, power_of_two(shape.hidden // count)) for count in pieces)
                fitting = [(count, block) for count, block in blocks if 32768 <= block * padded <= 65536]
                yield from (RouteConfig(height, block, count, 1, warps) for count, block in fitting)
