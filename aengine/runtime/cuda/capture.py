"""The executor of a CUDA device, with the steps that it captures as graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from aengine.cache.states import StateRoom
from aengine.cache.windows import WindowRoom
from aengine.config import EngineConfig
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.decode_shapes import DecodeShape, drafted_shapes, graph_sizes
from aengine.runtime.cuda.prefill_graphs import prefill_sizes
from aengine.runtime.cuda.ranks import DeviceRanks
from aengine.runtime.cuda.recording import empty_caches
from aengine.runtime.cuda.runner import Fits, GraphedExecutor
from aengine.runtime.ranks import RankedExecutor
from aengine.runtime.runner import PoolContext
from aengine.runtime.speculation.base import ProposerChoice
from aengine.runtime.step.executor import Executor
from aengine.step_plan import StepPlan

# The host launches the kernels of a step with more tokens faster than the device runs them.
MOST_LAUNCH_BOUND_TOKENS = 4096
GRAPH_BYTES = 8 * 2**20  # for the nodes of one graph


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes to capture: batch sizes of decode steps, token counts of steps with prefill chunks."""

    decode: list[int]
    prefill: list[int]
    adapted: bool = False  # whether each is captured a second time, with adapters
    drafted: Sequence[DecodeShape] = ()  # decode steps whose rows verify drafts, smallest first

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        prefill: bool,
        mixed: int,
        max_step_tokens: int,
        ranks: int = 1,
        lora: bool = False,
        most_drafts: int = 0,
    ) -> GraphSizes:
        """Choose the sizes.

        With several ranks, each rank computes a part of a step but launches all kernels. So larger steps are captured.

        Args:
            prefill: Whether steps with chunks can be captured.
            mixed: The most tokens of a step that both prefills and decodes.
            lora: Whether the model has memory for adapters.
            most_drafts: The most drafts of a row.
        """
        if not config.cuda_graphs:
            return cls([], [])
        close = min(mixed, MOST_LAUNCH_BOUND_TOKENS * ranks, max_step_tokens)
        chunks = prefill_sizes(close, mixed, max_step_tokens) if prefill else []
        drafted = drafted_shapes(config.max_num_seqs, most_drafts) if most_drafts else []
        return cls(graph_sizes(config.max_num_seqs), chunks, lora, sorted(drafted, key=lambda shape: shape.places))

    @property
    def largest(self) -> GraphSizes:
        """Only the largest size of each kind."""
        return GraphSizes(self.decode[-1:], self.prefill[-1:], self.adapted, self.drafted[-1:])

    @property
    def node_bytes(self) -> int:
        """The memory for the nodes of all graphs. Their tensors fit into the memory of the largest graphs."""
        graphs = len(self.decode) + len(self.prefill) + len(self.drafted)
        return graphs * (1 + self.adapted) * GRAPH_BYTES


class Executors:
    """The executors of all ranks, and `all`, which runs steps on all of them."""

    def __init__(self, ranks: Sequence[GraphedExecutor], devices: DeviceRanks) -> None:
        self.ranks = ranks
        self.devices = devices
        self.all: Executor = ranks[0] if len(ranks) == 1 else RankedExecutor(ranks, devices)

    def warm_up(self, plans: Iterable[StepPlan], replays_ends: bool = True) -> None:
        """Run steps, ignore their results and wait for the devices. Towers leave out most of their work.

        replays_ends: False: draws, verdicts and proposers are launched kernel by kernel, even if a graph contains them.
            Steps of other sizes, or with other draws, launch these kernels.
        """
        for rank in self.ranks:
            rank.replays_ends = replays_ends
            rank.rehearse_images(True)
        for plan in plans:
            self.all.execute(plan)
        for rank in self.ranks:
            rank.replays_ends = True
            rank.rehearse_images(False)
        self.devices.synchronize()


def make_executor(
    config: EngineConfig,
    decoder: Decoder,
    num_pages: int,
    max_model_len: int,
    sizes: GraphSizes,
    fits: Fits,
    states: StateRoom | None,
    windows: WindowRoom | None,
    speculation: ProposerChoice,
    pools: PoolContext = nullcontext,
) -> GraphedExecutor:
    """Make an executor with its graphs. Nothing is captured yet. Args as for `StepExecutor.make` and `add_graphs`."""
    executor = GraphedExecutor.make(
        config, decoder, num_pages, max_model_len, states, windows, speculation, use_kernels=True, pools=pools
    )
    executor.add_graphs(sizes.decode, sizes.drafted, sizes.prefill, fits)
    return executor


def capture(executors: Executors, progress: bool = False) -> None:
    """Record the graphs of every rank, the largest steps first. Waits for the devices.

    All steps are rehearsed first, so that every kernel is compiled and loaded before a recording begins.
    """
    devices = executors.devices
    by_size = list(zip(*map(_captures, executors.ranks), strict=True))  # for each size, the captures of every rank
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
    for graphs, size in _captures(executor):
        graphs.rehearse(size)


def _captures(executor: GraphedExecutor) -> list[tuple[Any, Any]]:
    """Return what an executor captures, in recording order: graphs, and one of their sizes."""
    kinds: tuple[Any, ...] = (executor.prefill_graphs, executor.decode_graphs)
    return [(graphs, size) for graphs in kinds if graphs is not None for size in reversed(graphs.sizes)]
