"""Pure-decode steps as CUDA graphs: one forward pass per batch size, and the common kinds of draw behind it.

A graph reads everything from the rows on the device: which rows decode (`row_index`), their last tokens, lengths
and pages. Between two replays the host sends only what changed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.cache.snapshots import slot_of
from aengine.cache.states import StatePool
from aengine.kernels.attention.prefix_attention import SharedRuns
from aengine.kernels.delta.base import StateBatch
from aengine.kernels.linear.small_linear import ROW_BORDERS
from aengine.kernels.row_steps import begin_decode, end_decode
from aengine.model.blocks.step import States
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.recording import GraphPart, borrowed, recorded
from aengine.runtime.step.own_tokens import draw_from_own
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.written import TURNS, WrittenDraws
from aengine.sampling.sampler import Kind, Sampler
from aengine.step_plan import MOST_SHARED_RUNS, SharedRun

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

CAPTURED_KINDS = (Kind.SIMPLE, Kind.FILTERED)  # of draws; the others decide something on the host
LEAST_SHARERS = 4  # smaller batches have too little to gain


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending: a batch padded to the next one wastes at most 12 % of its rows."""
    sizes = [1]
    while sizes[-1] < max_rows:
        last = sizes[-1]
        # The smallest batch that the next size serves is last + 1.
        following = max(last + 1, int((last + 1) / 0.88))
        # Nor is it padded into the slower kernels of larger ones.
        sizes.append(min([max_rows, following, *(border for border in ROW_BORDERS if border > last)]))
    return sizes


class ForwardKind(NamedTuple):
    """What a forward pass has besides."""

    shared: bool = False  # runs that rows share, which are read once
    adapted: bool = False  # rows with adapters


@dataclass(slots=True)
class _Captured:
    forward: dict[ForwardKind, torch.cuda.CUDAGraph]
    # [size, n] in the model's dtype: of the rank's own tokens; borrowed where no other pass is still to write it
    logits: Tensor
    positions: Tensor  # [size] int64: where the drawn tokens will stand
    draws: dict[Kind, torch.cuda.CUDAGraph]


class SharedBuffers:
    """The device's copy of which rows share which runs, at a fixed place for the graphs to read."""

    def __init__(self, max_rows: int, rows: Rows) -> None:
        self._rows = rows
        self._max_rows = max_rows
        # members [max_rows], starts [max_rows], group_starts [MOST_SHARED_RUNS + 1], lens [MOST_SHARED_RUNS]
        self._cells = torch.zeros(2 * max_rows + 2 * MOST_SHARED_RUNS + 1, dtype=torch.int32, device=rows.device)
        self._current: Sequence[SharedRun] = ()

    def runs(self, size: int) -> SharedRuns:
        """As the kernels read them, for a batch of this size."""
        members, starts, group_starts, lens = self._cells.split(
            [self._max_rows, self._max_rows, MOST_SHARED_RUNS + 1, MOST_SHARED_RUNS]
        )
        return SharedRuns(members=members[:size], group_starts=group_starts, lens=lens, starts=starts[:size])

    def send(self, shared: Sequence[SharedRun]) -> None:
        """Tell the device, unless these are the runs that it knows already."""
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


def shareable(model: ModelConfig, size: int) -> bool:
    """Whether a batch of this size is also captured with runs that rows share, which windows may have let go."""
    return size >= LEAST_SHARERS and model.windows[0] is None


class DecodeGraphs:
    """Captures part by part, the largest size first; replays for any batch of at most `sizes[-1]` rows, which is padded
    to a size that has been captured. All on the current stream.
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
        """pool: memory that graphs share which never run at the same time; states: of recurrent layers."""
        self._states = states
        # Of the rows in `_row_index`; slot 0 for padding.
        self._state_slots = torch.zeros(sizes[-1], dtype=torch.int32, device=rows.device)
        self._no_saves = torch.zeros(sizes[-1], dtype=torch.int32, device=rows.device)
        self._decoder = decoder
        self._kv = kv
        self._sampler = sampler
        self._rows = rows
        self.sizes = sizes
        self._row_index = torch.full((sizes[-1],), rows.padding, dtype=torch.int64, device=rows.device)
        self._query_starts = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=rows.device)
        self._current: list[int] = []  # what `_row_index` holds
        pinned = rows.device.type == "cuda"
        self._drawn = torch.zeros(len(rows.lengths), TURNS, dtype=torch.int64, pin_memory=pinned)
        self._graphs: dict[int, _Captured] = {}
        self._shared = SharedBuffers(sizes[-1], rows)
        self._pool = pool
        self.missed: GraphPart | None = None  # what the newest step would have taken, had it been recorded

    @property
    def parts(self) -> list[GraphPart]:
        """All that is recorded, the largest sizes first, and plain passes before those with runs that rows share."""
        plain = [GraphPart(size) for size in self.sizes[::-1]]
        return plain + [part._replace(shared=True) for part in plain if shareable(self._decoder.config, part.size)]

    def rehearse(self, part: GraphPart) -> None:
        """Launch what one part launches once, so that it is compiled and loaded before it is recorded. It writes into
        page 0 and changes no row, so that steps may be on their way.
        """
        self._row_index.fill_(self._rows.padding)
        self._state_slots.zero_()
        self._current = []
        self._shared.send(())
        for kind in self._kinds(part):
            logits, positions = self._forward(part.size, kind, rehearsal=True)
        for drawn in () if part.shared else CAPTURED_KINDS:
            self._draw(logits, positions, drawn)

    def record(self, part: GraphPart) -> None:
        """Record a part that was rehearsed, one with shared runs behind the plain one of its size. The largest should
        come first, so that the others fit into its memory.
        """
        plain, *others = self._kinds(part._replace(shared=False))
        if part.shared:
            captured, others = self._graphs[part.size], self._kinds(part)
            logits, positions = captured.logits, captured.positions
        else:
            graph = torch.cuda.CUDAGraph()
            with recorded(graph, self._pool):
                logits, positions = self._forward(part.size, plain)
            captured = _Captured({plain: graph}, logits, positions, {})
        for other in others:
            graph = torch.cuda.CUDAGraph()
            with recorded(graph, self._pool):
                other_logits, other_positions = self._forward(part.size, other)
                logits.copy_(other_logits)
                positions.copy_(other_positions)
            captured.forward[other] = graph
        for drawn in () if part.shared else CAPTURED_KINDS:
            graph = torch.cuda.CUDAGraph()
            with recorded(graph, self._pool):
                self._draw(logits, positions, drawn)
            captured.draws[drawn] = graph
        if not shareable(self._decoder.config, part.size):
            captured.logits = borrowed(logits)
        self._graphs[part.size] = captured

    def forward(self, rows: list[int], shared: Sequence[SharedRun]) -> tuple[Tensor, Tensor]:
        """Replay the forward pass for these rows: logits as `Head.own` gives them and the rows as a tensor [n] int64.

        The logits stay valid until the next replay.
        """
        size = self._size(len(rows))
        captured = self._graphs[size]
        best = self.sizes[bisect.bisect_left(self.sizes, len(rows))]
        self.missed = None if best == size else GraphPart(best)
        self._send(rows)
        kind = ForwardKind(bool(shared), self._rows.adapters_of(rows) is not None)
        if kind not in captured.forward:  # so few rows have nothing to gain from what they share
            kind = kind._replace(shared=False)
            if best == size and shareable(self._decoder.config, size):
                self.missed = GraphPart(size, True)
        if kind.shared:
            self._shared.send(shared)
        captured.forward[kind].replay()
        return captured.logits[: len(rows)], self._row_index[: len(rows)]

    def draw(self, rows: list[int], kind: Kind) -> WrittenDraws:
        """Replay a captured kind of draw behind `forward` of the same rows; it also feeds back and advances lengths.

        The rows' lengths on the host are those behind this step.
        """
        self._graphs[self._size(len(rows))].draws[kind].replay()
        lengths = self._rows.lengths
        return WrittenDraws(self._drawn, [row * TURNS + lengths[row] % TURNS for row in rows])

    def _kinds(self, part: GraphPart) -> list[ForwardKind]:
        """Of the part's forward passes, the plainest first."""
        return [ForwardKind(part.shared, adapted) for adapted in (False, True)[: 1 + (self._rows.adapter is not None)]]

    def _size(self, n: int) -> int:
        """The smallest recorded one that has room for n rows."""
        sizes = itertools.islice(self.sizes, bisect.bisect_left(self.sizes, n), None)
        return next(size for size in sizes if size in self._graphs)

    def _send(self, rows: list[int]) -> None:
        if rows == self._current:
            return
        size = self._size(len(rows))
        padding = size - len(rows)
        if self._states is None:
            self._row_index[:size].copy_(self._rows.upload(rows + [self._rows.padding] * padding))
        else:
            slots = [slot_of(row) for row in rows]
            index = self._rows.upload(rows + [self._rows.padding] * padding + slots + [0] * padding)
            self._row_index[:size].copy_(index[:size])
            self._state_slots[:size].copy_(index[size:])
        self._current = list(rows)

    def _forward(self, size: int, kind: ForwardKind, rehearsal: bool = False) -> tuple[Tensor, Tensor]:
        """The logits of the rank's own tokens, [size, n], and where the drawn tokens will stand [size] int64."""
        rows, index = self._rows, self._row_index[:size]
        adapters = rows.adapter[index] if kind.adapted and rows.adapter is not None else None
        inputs = begin_decode(index, rows.last_token, rows.length, rows.page_table, self._kv.page_size)
        attention = AttentionBatch(
            slots=inputs.slots,
            page_table=inputs.page_table,
            seq_lens=inputs.seq_lens,
            query_starts=self._query_starts[: size + 1],
            num_decodes=size,
            query_lens=[1] * size,
            context_lens=[rows.page_table.shape[1] * self._kv.page_size] * size,
            shared=self._shared.runs(size) if kind.shared else None,
        )
        if (table := rows.window_table) is not None:
            windows = begin_decode(index, rows.last_token, rows.length, table, self._kv.page_size)
            attention.sliding = attention.over(windows.slots, windows.page_table)
        hidden = self._decoder.forward(
            inputs.token_ids,
            inputs.positions,
            attention,
            self._kv,
            rehearsal=rehearsal,
            adapters=adapters,
            states=None if self._states is None else States(self._states, self._state_batch(size, inputs.positions)),
        )
        return self._decoder.own_logits(hidden, adapters), inputs.next_positions

    def _state_batch(self, size: int, positions: Tensor) -> StateBatch:
        slots = self._state_slots[:size]
        none = self._query_starts[size : size + 1]  # no chunks: they begin, and end, behind the decodes
        return StateBatch(slots, slots, none, positions, self._no_saves[:size], size)

    def _draw(self, logits: Tensor, positions: Tensor, kind: Kind) -> None:
        rows, index = self._rows, self._row_index[: len(logits)]
        if kind is Kind.SIMPLE:
            draws = draw_from_own(self._decoder, self._sampler, logits, index, positions)
        else:
            draws = self._sampler.draw_filtered(self._decoder.head.whole(logits), index, positions)
        end_decode(index, draws.token_ids, draws.finite, rows.last_token, rows.length, self._drawn, rows.padding)
