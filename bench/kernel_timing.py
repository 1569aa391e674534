"""How the kernel benchmarks measure: calls in a CUDA graph, inputs that rotate, JSON lines out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TextIO

import torch
from torch import Tensor

from aengine.kernels import elementwise, launch
from aengine.kernels.attention import decode_attention, inputs, prefix_attention
from aengine.kernels.draw import cutoff, gumbel
from aengine.kernels.linear import one_row, small_linear

READ_TB_S = 4.54  # of an H200, measured
DEVICE = torch.device("cuda", 0)


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
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


def random_half(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale


class Report:
    """JSON lines into a file, short lines to the terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def add(self, kind: str, case: str, us: float, size: float, **more: Any) -> None:
        """size: the bytes that the call must move."""
        row = {"kind": kind, "case": case, "us": round(us, 2), "floor_us": round(floor(size), 2), **more}
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()

    def say(self, text: str) -> None:
        print(text, flush=True)


def floor(size: float) -> float:
    """Microseconds that `size` bytes take at the read bandwidth of the device."""
    return size / READ_TB_S / 1e6


def brief(config: Any) -> str:
    return "default" if config is None else "/".join(str(int(value)) for value in astuple(config))


def attempt(measure: Callable[[], float], config: Any) -> list[tuple[float, Any]]:
    """Return the time of one configuration, or None if it does not fit."""
    try:
        return [(measure(), config)]
    except Exception as error:  # noqa: BLE001 (too much shared memory, most of all)
        print("failed", brief(config), repr(error)[:120], flush=True)
        return []


def precompile(function: Callable[[Any], None], jobs: Sequence[Any], report: Report) -> None:
    """Fill Triton's cache on disk from many processes: compiling is most of a sweep's time."""
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(14, mp_context=context) as pool:
        list(pool.map(function, jobs, chunksize=4))
    report.say(f"compiled {len(jobs)} variants in {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def overlapping(on: bool) -> Iterator[None]:
    """Within it, kernels are launched with or without programmatic dependent launch."""
    modules: tuple[Any, ...] = (
        one_row,
        small_linear,
        decode_attention,
        prefix_attention,
        elementwise,
        inputs,
        gumbel,
        cutoff,
    )
    real = launch.launch_for
    for module in modules:
        module.launch_for = lambda device: replace(real(device), overlap=on)
    try:
        yield
    finally:
        for module in modules:
            module.launch_for = real


@dataclass(frozen=True)
class Heads:
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


class Pool:
    """One layer's caches, and page tables that together walk through more memory than any cache holds."""

    def __init__(self, pages: int, heads: Heads, page: int = 16) -> None:
        self.page = page
        self.k = random_half(pages, page, heads.kv_heads, heads.dim)
        self.v = random_half(pages, page, heads.kv_heads, heads.dim)
        self.order = torch.randperm(pages - 1, device=DEVICE).to(torch.int32) + 1

    def tables(self, rows: int, context: int, most: int = 16) -> list[Tensor]:
        each = rows * -(-context // self.page)
        sets = max(1, min(most, len(self.order) // each))
        return [self.order[i * each : (i + 1) * each].view(rows, -1) for i in range(sets)]
