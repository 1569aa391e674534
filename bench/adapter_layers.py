"""Times decode steps and prefill chunks of layers with random weights, with and without adapters.

Everything is in a CUDA graph; a layer's weights alone are more than the second-level cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aengine.kernels.attention.decode_attention import PagedDecode
from aengine.kernels.attention.heads import Heads as QueryHeads
from aengine.kernels.attention.inputs import qk_norm_rope_store
from aengine.kernels.linear.base import Linear
from aengine.kernels.lora.base import AdapterWeights, TokenAdapters
from aengine.kernels.triton_kernels import TritonKernels
from bench.kernel_timing import Heads, Pool, Report, floor, graph_time

DECODED = 64  # rows up to which attention takes part, over CONTEXT tokens each
CONTEXT = 570


@dataclass(frozen=True)
class LayerShape:
    """Inputs and the outputs of each part."""

    hidden: int = 4096
    inter: int = 12288
    heads: Heads = field(default_factory=Heads)

    @property
    def linears(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        q, kv = self.heads.heads * self.heads.dim, self.heads.kv_heads * self.heads.dim
        return {
            "qkv": (self.hidden, (q, kv, kv)),
            "o": (q, (self.hidden,)),
            "gate_up": (self.hidden, (self.inter, self.inter)),
            "down": (self.inter, (self.hidden,)),
        }

    def adapter_bytes(self, rank: int) -> int:
        """Of one adapter in one layer."""
        return sum(2 * rank * (len(parts) * k + sum(parts)) for k, parts in self.linears.values())


class AdaptedLayers:
    """Some layers, each with a given number of adapters of one rank."""

    def __init__(self, shape: LayerShape, layers: int, adapters: int, rank: int, device: torch.device) -> None:
        self.shape, self.device, self.adapters = shape, device, adapters
        self.tokens = TokenAdapters()
        self.kernels = TritonKernels()
        self.layers = [self._layer(adapters + 1, rank) for _ in range(layers)]
        self.norms = [self.kernels.norm(self.random(shape.hidden), 1e-6) for _ in range(2 * layers)]
        self.heads = [self._heads() for _ in range(layers)]
        self.cos_sin = torch.zeros(4096, shape.heads.dim, device=device)
        pages = DECODED * -(-CONTEXT // 16) + 17
        self.pools = [Pool(pages, shape.heads) for _ in range(layers if device.type == "cuda" else 0)]

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16).mul_(scale)

    def _heads(self) -> QueryHeads:
        dim = self.shape.heads.dim
        return QueryHeads(self.shape.heads.heads, self.random(dim), self.random(dim), 1e-6)

    def _layer(self, places: int, rank: int) -> dict[str, Linear]:
        layer: dict[str, Linear] = {}
        for name, (k, parts) in self.shape.linears.items():
            n = sum(parts)
            a, b = self.random(places, len(parts) * rank, k, scale=0.02), self.random(places, n, rank, scale=0.02)
            a[0], b[0] = 0, 0
            linear = self.kernels.dense(self.random(n, k, scale=0.02), None)
            layer[name] = self.kernels.adapted(linear, AdapterWeights(a, b, parts), self.tokens)
        return layer

    def places(self, rows: int, used: int) -> Tensor:
        """Of rows that take turns with the first `used` adapters, in no order."""
        places = 1 + torch.arange(rows) % used
        return places[torch.randperm(rows)].to(self.device, torch.int32)

    def step(self, rows: int, places: Tensor | None) -> Any:
        """A function that enqueues one pass."""
        hidden, heads = self.shape.hidden, self.shape.heads
        x0, attended = self.random(rows, hidden), self.random(rows, heads.heads * heads.dim)
        decode, positions = PagedDecode(), torch.full((rows,), CONTEXT - 1, device=self.device)
        lens, slots = positions.int() + 1, torch.arange(rows, device=self.device)

        def run() -> Tensor:
            self.tokens.places = places
            x = x0.clone()
            for index, layer in enumerate(self.layers):
                qkv = layer["qkv"].apply(x, norm=self.norms[2 * index])
                mixed = attended
                if rows <= DECODED and self.pools:
                    pool = self.pools[index]
                    cache, table = (pool.k, pool.v), pool.tables(rows, CONTEXT, most=1)[0]
                    q = qk_norm_rope_store(qkv, self.heads[index], self.cos_sin, positions, cache, slots)
                    mixed = decode(q, *cache, table, lens, 0.09).flatten(1)
                x = layer["o"].apply(mixed, residual=x)
                gate_up = layer["gate_up"].apply(x, norm=self.norms[2 * index + 1])
                x = layer["down"].apply(gate_up, gated=True, residual=x)
            self.tokens.places = None
            return x

        return run

    def time(self, rows: int, used: int, replays: int = 9) -> float:
        """Microseconds a layer; used: adapters that the rows have, 0 for none."""
        with torch.inference_mode():
            places = self.places(rows, used) if used else None
            return graph_time([self.step(rows, places)], replays) / len(self.layers)


def bench_adapters(report: Report, sweep: bool) -> None:
    shape = LayerShape()
    layers = AdaptedLayers(shape, 4, 64, 16, torch.device("cuda", 0))
    for rows in (1, 8, 64, 256, 2048):
        plain = layers.time(rows, 0)
        report.add("adapters", f"{rows} rows", plain, 0, adapters=0)
        for used in (1, 8, 64):
            if used > rows:
                continue
            us, read = layers.time(rows, used), used * shape.adapter_bytes(16)
            report.add("adapters", f"{rows} rows", us, read, adapters=used)
            report.say(
                f"adapters {rows:4} rows, {used:2} of rank 16: {plain:7.1f} to {us:7.1f} us a layer, "
                f"{plain / us:.1%}; floor of what they add {floor(read):6.1f}"
            )
