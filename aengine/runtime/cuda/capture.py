"""The executor of a CUDA device, with the steps that it captures as graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from aengine.cache.kv import KVPool, SlidingLayers
from aengine.cache.states import StatePool, StateRoom
from aengine.cache.windows import WindowRoom
from aengine.config import EngineConfig
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.decode_graphs import DecodeGraphs, graph_sizes
from aengine.runtime.cuda.prefill_graphs import PrefillGraphs, prefill_sizes
from aengine.runtime.cuda.ranks import DeviceRanks
from aengine.runtime.cuda.recording import empty_caches
from aengine.runtime.cuda.runner import GraphedExecutor
from aengine.runtime.ranks import RankedExecutor
from aengine.runtime.step.executor import Executor
from aengine.runtime.step.rows import Rows
from aengine.sampling.sampler import Sampler
from aengine.sampling.upload import upload
from aengine.step_plan import StepPlan

# The host launches the kernels of a step with more tokens faster than the device runs them.
MOST_LAUNCH_BOUND_TOKENS = 4096
GRAPH_BYTES = 8 * 2**20  # for the nodes of one graph

Fits = Callable[[int, Sequence[int], int], bool]
Pools = Callable[[torch.device], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes to capture: batch sizes of decode steps, token counts of steps with prefill chunks."""

    decode: list[int]
    prefill: list[int]
    adapted: bool = False  # whether each is captured a second time, with adapters

    @classmethod
    def from_config(
        cls, config: EngineConfig, prefill: bool, mixed: int, max_step_tokens: int, ranks: int = 1, lora: bool = False
    ) -> GraphSizes:
        """Choose the sizes.

        With several ranks, each rank computes a part of a step but launches all kernels. So larger steps are captured.

        Args:
            prefill: Whether steps with chunks can be captured.
            mixed: The most tokens of a step that both prefills and decodes.
            lora: Whether the model has memory for adapters.
        """
        if not config.cuda_graphs:
            return cls([], [])
        close = min(mixed, MOST_LAUNCH_BOUND_TOKENS * ranks, max_step_tokens)
        chunks = prefill_sizes(close, mixed, max_step_tokens) if prefill else []
        return cls(graph_sizes(config.max_num_seqs), chunks, lora)

    @property
    def largest(self) -> GraphSizes:
        """Only the largest size of each kind."""
        return GraphSizes(self.decode[-1:], self.prefill[-1:], self.adapted)

    @property
    def node_bytes(self) -> int:
        """The memory for the nodes of all graphs. Their tensors fit into the memory of the largest graphs."""
        return (len(self.decode) + len(self.prefill)) * (1 + self.adapted) * GRAPH_BYTES


class Executors:
    """The executors of all ranks, and `all`, which runs steps on all of them."""

    def __init__(self, ranks: Sequence[GraphedExecutor], devices: DeviceRanks) -> None:
        self.ranks = ranks
        self.devices = devices
        self.all: Executor = ranks[0] if len(ranks) == 1 else RankedExecutor(ranks, devices)

    def warm_up(self, plans: Iterable[StepPlan]) -> None:
        """Run steps, ignore their results and wait for the devices."""
        for plan in plans:
            self.all.execute(plan)
        self.devices.synchronize()


def make_executor(
    config: EngineConfig,
    decoder: Decoder,
    num_pages: int,
    max_model_len: int,
    sizes: GraphSizes,
    fits: Fits,
    states: StateRoom | None = None,
    windows: WindowRoom | None = None,
    pools: Pools = nullcontext,
) -> GraphedExecutor:
    """Make an executor with rows, a KV pool and a sampler on the decoder's device. Nothing is captured yet.

    Args:
        fits: The `fits` method of the attention backend.
        states: For a model with recurrent layers.
        windows: For a model whose layers with a window have pages of their own.
        pools: A context manager in which KV pools and states are allocated.
    """
    device = decoder.device
    with pools(device):
        sliding = None if windows is None else SlidingLayers(decoder.config.sliding, windows.num_pages)
        kv = KVPool(decoder.config.kv_shape(config.page_size, decoder.kv_dtype), num_pages, device, sliding)
        pool = None if states is None else StatePool(states.shape, states.slots, device)

    def send(values: Sequence[int]) -> Tensor:
        return upload(np.array(values, dtype=np.int64), device)

    pages_per_row, adapters = -(-max_model_len // config.page_size), decoder.adapters is not None
    rows = Rows(config.max_num_seqs, pages_per_row, device, send, adapters, windows is not None, decoder.near_shift)
    sampler = Sampler(rows.count, decoder.config.vocab_size, device)
    executor = GraphedExecutor(decoder, kv, sampler, rows, pool)
    # All graphs share one pool, because only one runs at a time.
    memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    if sizes.decode:
        executor.decode_graphs = DecodeGraphs(decoder, kv, sampler, rows, sizes.decode, memory, pool)
    if sizes.prefill:
        executor.prefill_graphs = PrefillGraphs(decoder, kv, rows, sizes.prefill, fits, memory, pool)
    return executor


def capture(executors: Executors, progress: bool = False) -> None:
    """Record the graphs of every rank, the largest steps first. Waits for the devices.

    All steps are rehearsed first, so that every kernel is compiled and loaded before a recording begins.
    """
    devices = executors.devices
    by_size = list(zip(*map(graphs_and_sizes, executors.ranks), strict=True))  # for each size, the graphs of every rank
    for ranks in by_size:
        devices([partial(graphs.rehearse, size) for graphs, size in ranks])
        devices.synchronize()
    empty_caches()  # graphs cannot use the memory that torch caches
    hidden = None if progress else True  # None: tqdm hides the bar unless stderr is a terminal
    for ranks in tqdm(by_size, "capturing graphs", unit="graph", delay=2, disable=hidden, leave=False):
        devices([partial(graphs.record, size) for graphs, size in ranks], short=True)
    empty_caches()


def rehearse(executor: GraphedExecutor) -> None:
    """Launch every step that `capture` launches before it records."""
    for graphs, size in graphs_and_sizes(executor):
        graphs.rehearse(size)


def graphs_and_sizes(executor: GraphedExecutor) -> list[tuple[PrefillGraphs | DecodeGraphs, int]]:
    """Return the graphs and sizes of an executor in recording order."""
    both = (executor.prefill_graphs, executor.decode_graphs)
    return [(graphs, size) for graphs in both if graphs is not None for size in reversed(graphs.sizes)]
