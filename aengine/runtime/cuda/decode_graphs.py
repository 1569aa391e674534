"""Pure-decode steps as CUDA graphs. Each batch size has graphs of the forward pass and of each common kind of draw.

A graph reads its inputs on the device: the rows that decode (`_row_index`), their last tokens, lengths and pages.
Between two replays the host sends only changes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.cache.snapshots import slot_of
from aengine.cache.states import StatePool
from aengine.kernels.attention.prefix_attention import SharedRuns
from aengine.kernels.recurrent.state import StateBatch
from aengine.kernels.row_steps import begin_decode, end_decode
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.recording import non_owning_view, recorded
from aengine.runtime.step.cells import StepTensors
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.sharded_draws import draw_in_graph
from aengine.runtime.step.written import TURNS, WrittenDraws
from aengine.sampling.sampler import Kind, Sampler
from aengine.step_plan import MOST_SHARED_RUNS, SharedRun

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

CAPTURED_KINDS = (Kind.SIMPLE, Kind.FILTERED)  # the host chooses the kernels of the other kinds of draw
LEAST_SHARERS = 4  # rows; a smaller batch gains too little from shared runs of pages
# Batch sizes to capture. Such steps mostly read weights, so padding a batch to the next size makes a step at most about
# 4 % longer (H200; 8B bf16, 30B-A3B, gpt-oss-20b; bench/KERNELS.md).
SMALL_SIZES = (1, 2, 3, 4, 8, 16, 20, 32, 40, 48, 64)
LEAST_USED = 0.87  # least share of rows in use if a batch is padded to a size above SMALL_SIZES
BORDER = 128  # rows; with more rows, matrix products use slower kernels, and a step takes up to 20 % longer


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture, ascending, `max_rows` last."""
    sizes = [size for size in SMALL_SIZES if size < max_rows]
    while (following := int(((sizes[-1] if sizes else 0) + 1) / LEAST_USED)) < max_rows:
        sizes.append(BORDER if sizes[-1] < BORDER < following else following)
    return [*sizes, max_rows]


def shared_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes that are also captured with shared runs: the largest and every second one below it."""
    return [size for size in sizes[::-1][::2] if size >= LEAST_SHARERS][::-1]


class ForwardKind(NamedTuple):
    """A variant of the forward pass."""

    shared: bool = False  # whether pages that several rows share are read once for all of them
    adapted: bool = False  # whether rows may have adapters


@dataclass(slots=True)
class _Captured:
    forward: dict[ForwardKind, torch.cuda.CUDAGraph]
    # [size, n] in the model's dtype; n: this rank's part of the vocabulary. Valid until another size is replayed.
    logits: Tensor
    positions: Tensor  # [size] int64: positions of the drawn tokens
    draws: dict[Kind, torch.cuda.CUDAGraph]


class SharedBuffers:
    """The shared runs of pages of a batch, in a device buffer with a fixed address, which graphs read."""

    def __init__(self, max_rows: int, rows: Rows) -> None:
        self._rows = rows
        self._max_rows = max_rows
        # members [max_rows], starts [max_rows], group_starts [MOST_SHARED_RUNS + 1], lens [MOST_SHARED_RUNS]
        self._cells = torch.zeros(2 * max_rows + 2 * MOST_SHARED_RUNS + 1, dtype=torch.int32, device=rows.device)
        self._current: Sequence[SharedRun] = ()

    def runs(self, size: int) -> SharedRuns:
        """Return views for a batch of this size."""
        members, starts, group_starts, lens = self._cells.split(
            [self._max_rows, self._max_rows, MOST_SHARED_RUNS + 1, MOST_SHARED_RUNS]
        )
        return SharedRuns(members=members[:size], group_starts=group_starts, lens=lens, starts=starts[:size])

    def send(self, shared: Sequence[SharedRun]) -> None:
        """Upload the runs, unless the device has them already."""
        if shared is self._current:
            return
        members = [place for run in shared for place in run.members]
        starts = [0] * self._max_rows
        group_starts = [0]
        for run in shared:
            for place in run.members:
                starts[place] = run.tokens
            group_starts.append(group_starts[-1] + len(run.members))
        group_starts += group_starts[-1:] * (MOST_SHARED_RUNS - len(shared))
        lens = [run.tokens for run in shared] + [0] * (MOST_SHARED_RUNS - len(shared))
        members += [0] * (self._max_rows - len(members))
        self._cells.copy_(self._rows.upload(members + starts + group_starts + lens))
        self._current = shared


class DecodeGraphs:
    """Captures and replays decode steps. A batch of at most `sizes[-1]` rows is padded to the next captured size.

    All work is enqueued on the current stream.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        sampler: Sampler,
        rows: Rows,
        sizes: list[int],
        pool: _POOL_HANDLE | None = None,
        states: StatePool | None = None,
    ) -> None:
        """pool: memory shared by graphs that never run at the same time. states: the pool of recurrent layers."""
        self._states = states
        # The state slots of the rows in `_row_index`. Padding has slot 0.
        self._state_slots = torch.zeros(sizes[-1], dtype=torch.int32, device=rows.device)
        self._no_saves = torch.zeros(sizes[-1], dtype=torch.int32, device=rows.device)
        self._decoder = decoder
        self._kv = kv
        self._sampler = sampler
        self._rows = rows
        self.sizes = sizes
        self._row_index = torch.full((sizes[-1],), rows.padding, dtype=torch.int64, device=rows.device)
        self._query_starts = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=rows.device)
        self._current: tuple[int, list[int]] = (0, [])  # the contents of `_row_index`: a size, and the rows
        self._size = 0  # the size replayed last
        pinned = rows.device.type == "cuda"
        self._drawn = torch.zeros(len(rows.lengths), TURNS, dtype=torch.int64, pin_memory=pinned)
        self._graphs: dict[int, _Captured] = {}
        self._shared = SharedBuffers(sizes[-1], rows)
        self._pool = pool
        # If all layers have windows, pages of a shared run may have been freed.
        self._shared_sizes = shared_sizes(sizes) if decoder.config.windows[0] is None else []

    def rehearse(self, size: int) -> None:
        """Launch every kernel of one size, so that all are compiled and loaded before the recording."""
        self._row_index.fill_(self._rows.padding)
        self._state_slots.zero_()
        self._current = (0, [])
        self._shared.send(())
        for kind in self._kinds(size):
            logits, positions = self._forward(size, kind, rehearsal=True)
        for drawn in CAPTURED_KINDS:
            self._draw(logits, positions, drawn)

    def record(self, size: int) -> None:
        """Record one rehearsed size. Record the largest first, so that the others fit into its memory."""
        plain, *others = self._kinds(size)
        forward, draws = {plain: torch.cuda.CUDAGraph()}, {}
        with recorded(forward[plain], self._pool):
            logits, positions = self._forward(size, plain)
        for other in others:
            forward[other] = torch.cuda.CUDAGraph()
            with recorded(forward[other], self._pool):
                other_logits, other_positions = self._forward(size, other)
                logits.copy_(other_logits)
                positions.copy_(other_positions)
        for drawn in CAPTURED_KINDS:
            draws[drawn] = torch.cuda.CUDAGraph()
            with recorded(draws[drawn], self._pool):
                self._draw(logits, positions, drawn)
        self._graphs[size] = _Captured(forward, non_owning_view(logits), positions, draws)

    def forward(self, rows: list[int], shared: Sequence[SharedRun]) -> tuple[Tensor, Tensor, Tensor]:
        """Replay the forward pass for n rows. Each row is one token longer afterwards.

        Returns logits as `Head.shard_logits` returns them, the rows as a tensor [n] int64, and the positions of the
        tokens to draw [n] int64. All are valid until the next replay.
        """
        n = len(rows)
        with_shared = bool(shared) and n >= LEAST_SHARERS and bool(self._shared_sizes)
        sizes = self._shared_sizes if with_shared else self.sizes
        self._size = sizes[bisect.bisect_left(sizes, n)]
        self._send(rows, self._size)
        if with_shared:
            self._shared.send(shared)
        captured = self._graphs[self._size]
        captured.forward[ForwardKind(with_shared, self._rows.adapters_of(rows) is not None)].replay()
        return captured.logits[:n], self._row_index[:n], captured.positions[:n]

    def draw(self, rows: list[int], kind: Kind) -> WrittenDraws:
        """Replay a captured kind of draw after `forward` of the same rows, and store the drawn ids in `last_token`.

        Call it after `Rows.advance` for this step.
        """
        self._graphs[self._size].draws[kind].replay()
        lengths = self._rows.lengths
        return WrittenDraws(self._drawn, [row * TURNS + lengths[row] % TURNS for row in rows])

    def _kinds(self, size: int) -> list[ForwardKind]:
        """Return the variants of the forward pass that a size has, the plainest first."""
        shared = [False, True] if size in self._shared_sizes else [False]
        adapted = [False] if self._rows.adapter is None else [False, True]
        return [ForwardKind(*kind) for kind in itertools.product(shared, adapted)]

    def _send(self, rows: list[int], size: int) -> None:
        if (size, rows) == self._current:
            return
        padding = size - len(rows)
        if self._states is None:
            self._row_index[:size].copy_(self._rows.upload(rows + [self._rows.padding] * padding))
        else:
            slots = [slot_of(row) for row in rows]
            index = self._rows.upload(rows + [self._rows.padding] * padding + slots + [0] * padding)
            self._row_index[:size].copy_(index[:size])
            self._state_slots[:size].copy_(index[size:])
        self._current = (size, list(rows))

    def _forward(self, size: int, kind: ForwardKind, rehearsal: bool = False) -> tuple[Tensor, Tensor]:
        """Return logits for this rank's part of the vocabulary, [size, n], and positions to draw for, [size] int64."""
        rows, index = self._rows, self._row_index[:size]
        inputs = begin_decode(
            index, rows.last_token, rows.length, rows.page_table, self._kv.page_size, rows.padding, rows.window_table
        )
        adapters = rows.adapter[index] if kind.adapted and rows.adapter is not None else None
        tensors = StepTensors(
            token_ids=inputs.token_ids,
            positions=rows.rotary_positions(index, inputs.positions),
            next_positions=inputs.next_positions,
            slots=inputs.slots,
            page_table=inputs.page_table,
            seq_lens=inputs.seq_lens,
            query_starts=self._query_starts[: size + 1],
            num_decodes=size,
            window_slots=inputs.window_slots,
            window_table=inputs.window_table,
            adapters=adapters,
            states=None if self._states is None else self._state_batch(size, inputs.positions),
            shared=self._shared.runs(size) if kind.shared else None,
        )
        hidden = tensors.forward(self._decoder, self._kv, self._states, rehearsal=rehearsal)
        return self._decoder.shard_logits(hidden, adapters), inputs.next_positions

    def _state_batch(self, size: int, positions: Tensor) -> StateBatch:
        slots = self._state_slots[:size]
        no_chunks = self._query_starts[size : size + 1]  # only the end of the decodes
        return StateBatch(slots, slots, no_chunks, positions, self._no_saves[:size], size)

    def _draw(self, logits: Tensor, positions: Tensor, kind: Kind) -> None:
        rows, index = self._rows, self._row_index[: len(logits)]
        draws = draw_in_graph(self._decoder, self._sampler, logits, index, positions, kind)
        end_decode(index, draws.token_ids, draws.finite, rows.last_token, rows.length, self._drawn, rows.padding)
