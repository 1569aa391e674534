"""Steps with prefill chunks as CUDA graphs: one forward pass per number of tokens, whatever the tokens belong to.

A step of a few hundred tokens takes the device less time than launching its kernels one by one takes the host. So the
forward pass is captured for some numbers of tokens, over buffers that say which row each token belongs to and where
each chunk ends; a step is padded to the next number with tokens of the padding row, whose KV goes into page 0.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.cache.snapshots import slot_of
from aengine.cache.states import StatePool
from aengine.kernels.delta.base import StateBatch
from aengine.model.blocks.step import States
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.recording import recorded
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.states import token_saves
from aengine.sampling.upload import upload
from aengine.step_plan import StepPlan

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

NOTHING = StepPlan(step=0, new_rows=[], new_pages=[], decode=[], prefill=[], page_copies=[])
MOST_CHUNKS = 72  # more than enter in one step
MOST_PADDING = 128  # tokens; beyond, the padding costs more than the launches


def prefill_sizes(close: int, mixed: int, most: int) -> list[int]:
    """Numbers of tokens to capture, ascending: near each other up to `close`, that of full steps of prompts beside
    decodes, which carry `mixed`, and `most` itself.

    The device takes longer for steps beyond `close` than the host for their launches. But full ones come one after the
    other, and the host stands still where the launch queue has no room for two of them.
    """
    sizes = {
        *range(16, 64, 16),
        *range(64, 256, 32),
        *range(256, 512, 64),
        *range(512, close + MOST_PADDING, MOST_PADDING),
        -(-mixed // MOST_PADDING) * MOST_PADDING,
    }
    return [size for size in sorted(sizes) if size < most] + [most]


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a captured step has room for: tokens, decodes and draws among them, and chunks, the padding's included."""

    tokens: int
    rows: int
    chunks: int

    @classmethod
    def of(cls, tokens: int, max_rows: int) -> PrefillShape:
        return cls(tokens, min(tokens, max_rows), min(tokens + 1, MOST_CHUNKS))

    @property
    def widths(self) -> list[int]:
        """How many numbers of each kind describe the step, in the order of `StepCells`."""
        rows, chunks = self.rows, self.chunks
        return [self.tokens] * 3 + [rows + chunks] * 2 + [chunks + 1] + [rows] * 3

    @property
    def state_widths(self) -> list[int]:
        """Of those numbers, behind the others, that recurrent layers read."""
        return [self.rows + self.chunks] * 2 + [self.tokens]

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step's chunks, and the tokens behind draws and pools, fit. Its tokens do."""
        return len(plan.prefill) < self.chunks and len(plan.sampled_rows) + plan.pooled <= self.rows


@dataclass(slots=True)
class StepCells:
    """A step in numbers, all int64; on the host to be written, on the device to be read."""

    token_ids: Tensor  # [tokens]; -1: what the row drew last
    positions: Tensor  # [tokens]
    token_rows: Tensor  # [tokens]
    rows: Tensor  # [rows + chunks]: of the decodes, the last ones padding, then of the chunks
    lens: Tensor  # [rows + chunks]: how long they are after the step; a decode that does not exist: -1
    chunk_starts: Tensor  # [chunks + 1]: which token each chunk begins with
    wanted: Tensor  # [rows]: the token behind each draw, then the last one of each chunk that is pooled
    draw_rows: Tensor  # [rows]
    draw_positions: Tensor  # [rows]: the place that the drawn token takes in its sequence
    # As `StateBatch` has them; they come last, and are sent where there are recurrent layers.
    state_slots: Tensor  # [rows + chunks]
    state_sources: Tensor  # [rows + chunks]
    state_saves: Tensor  # [tokens]

    @classmethod
    def over(cls, cells: Tensor, shape: PrefillShape) -> StepCells:
        widths = shape.widths + shape.state_widths
        return cls(*cells[: sum(widths)].split(widths))


def describe(plan: StepPlan, shape: PrefillShape, lengths: list[int], padding: int, limit: int) -> NDArray[np.int64]:
    """The numbers of a step that `shape` takes.

    lengths: of all rows, before the step; padding: the padding row, which holds `limit` tokens.
    """
    cells = np.zeros(sum(shape.widths), dtype=np.int64)
    token_ids, positions, token_rows, rows, lens, starts, wanted, draw_rows, draw_positions = np.split(
        cells, np.cumsum(shape.widths)[:-1]
    )
    decodes, first = len(plan.decode), shape.rows
    rows[:] = padding
    lens[:first] = -1
    token_ids[:decodes] = -1
    positions[:decodes] = [lengths[row] for row in plan.decode]
    token_rows[:decodes] = rows[:decodes] = draw_rows[:decodes] = plan.decode
    lens[:decodes] = draw_positions[:decodes] = positions[:decodes] + 1
    wanted[:decodes] = range(decodes)
    at = draw = decodes
    pooled = len(plan.sampled_rows)
    for place, chunk in enumerate(plan.prefill):
        end, count = chunk.start + len(chunk.token_ids), len(chunk.token_ids)
        token_ids[at : at + count] = chunk.token_ids
        positions[at : at + count] = range(chunk.start, end)
        token_rows[at : at + count] = rows[first + place] = chunk.row
        lens[first + place] = end
        starts[place] = at
        at += count
        if chunk.samples:
            drawing = [chunk.row, *chunk.forks]
            draw_rows[draw : draw + len(drawing)] = drawing
            draw_positions[draw : draw + len(drawing)] = end
            wanted[draw : draw + len(drawing)] = at - 1
            draw += len(drawing)
        if chunk.pool is not None:
            wanted[pooled] = at - 1
            pooled += 1
    # The rest is one chunk of the padding row, from its beginning.
    rest, chunks = shape.tokens - at, len(plan.prefill)
    positions[at:] = np.arange(rest) % limit
    token_rows[at:] = padding
    lens[first + chunks] = min(rest, limit)
    starts[chunks] = at
    starts[chunks + 1 :] = shape.tokens
    return cells


def describe_states(plan: StepPlan, shape: PrefillShape) -> NDArray[np.int64]:
    """The numbers of the same step that recurrent layers read. The padding is a chunk of nobody's."""
    cells = np.zeros(sum(shape.state_widths), dtype=np.int64)
    slots, sources, saves = np.split(cells, np.cumsum(shape.state_widths)[:-1])
    decodes, first = len(plan.decode), shape.rows
    slots[:first] = -1
    slots[:decodes] = sources[:decodes] = [slot_of(row) for row in plan.decode]
    for place, chunk in enumerate(plan.prefill, first):
        slots[place] = slot_of(chunk.row)
        sources[place] = slot_of(chunk.row) if chunk.start else 0
    saves[:] = token_saves(plan, shape.tokens)
    return cells


class PrefillGraphs:
    """Captures size by size, the largest first; replays for any step that fits. All on the current stream."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        rows: Rows,
        sizes: list[int],
        fits: Callable[[int, Sequence[int], int], bool],
        pool: _POOL_HANDLE | None = None,
        states: StatePool | None = None,
    ) -> None:
        """fits: the attention backend's; pool: memory that graphs share which never run at the same time; states: of
        recurrent layers.
        """
        self._states = states
        self._decoder = decoder
        self._kv = kv
        self._rows = rows
        self._pool = pool
        self.sizes = sizes
        self._fits = fits
        self._shapes = {size: PrefillShape.of(size, rows.padding) for size in sizes}
        widest = sum(self._shapes[sizes[-1]].widths) + sum(self._shapes[sizes[-1]].state_widths)
        self._cells = torch.zeros(widest, dtype=torch.int64, device=rows.device)
        self._hidden = torch.empty((rows.padding, decoder.config.hidden_size), dtype=decoder.dtype, device=rows.device)
        self._sums = torch.empty(sizes[-1], dtype=torch.float32, device=rows.device)
        # By tokens, and by whether some have adapters.
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._adapted = [False] if rows.adapter is None else [False, True]
        # The table of a row ends with a page that may be in use only in part.
        self._limit = max(1, (rows.page_table.shape[1] - 1) * kv.page_size)

    def rehearse(self, size: int) -> None:
        """Launch everything of one size once, so that it is compiled and loaded before it is recorded."""
        shape = self._emptied(size)
        for adapted in self._adapted:
            self.forward(shape, adapted, rehearsal=True)

    def record(self, size: int) -> None:
        """Record one rehearsed size. The largest should come first, so that the others fit into its memory."""
        shape = self._emptied(size)
        for adapted in self._adapted:
            self._graphs[size, adapted] = graph = torch.cuda.CUDAGraph()
            with recorded(graph, self._pool):
                self.forward(shape, adapted)

    def shape_for(self, plan: StepPlan) -> PrefillShape | None:
        """Return the captured shape that this step fits into without much padding, or None."""
        tokens = plan.num_tokens
        place = bisect.bisect_left(self.sizes, tokens)
        if place == len(self.sizes) or self.sizes[place] - tokens > MOST_PADDING:
            return None
        if (self.sizes[place], False) not in self._graphs:  # the start-up runs steps before it records
            return None
        shape = self._shapes[self.sizes[place]]
        contexts = [chunk.start + len(chunk.token_ids) for chunk in plan.prefill] + [shape.tokens - tokens]
        return shape if shape.takes(plan) and self._fits(shape.tokens, contexts, self._kv.page_size) else None

    def replay(self, plan: StepPlan, shape: PrefillShape, adapted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the forward pass: hidden states of the draws and, behind them, of the chunks that are pooled; rows and
        positions of the draws; and `sums` of all tokens. adapted: whether some of them have adapters.

        [draws + pooled, hidden] in the model's dtype, [draws] int64, [draws] int64, [tokens] float32, each valid until
        the next replay.
        """
        self._send(plan, shape)
        self._graphs[shape.tokens, adapted].replay()
        cells = StepCells.over(self._cells, shape)
        draws, tokens = len(plan.sampled_rows), plan.num_tokens
        wanted = draws + plan.pooled
        return self._hidden[:wanted], cells.draw_rows[:draws], cells.draw_positions[:draws], self._sums[:tokens]

    def forward(self, shape: PrefillShape, adapted: bool = False, rehearsal: bool = False) -> None:
        """The step that the cells describe: hidden states of the wanted tokens, `sums`, and the lengths of its rows."""
        rows, cells = self._rows, StepCells.over(self._cells, shape)
        adapters = rows.adapter[cells.token_rows] if adapted and rows.adapter is not None else None
        decode_rows, chunk_rows = cells.rows.split([shape.rows, shape.chunks])
        decode_lens, chunk_lens = cells.lens.to(torch.int32).split([shape.rows, shape.chunks])
        chunk_starts = cells.chunk_starts.to(torch.int32)
        slots = rows.slots(cells.token_rows, cells.positions, self._kv.page_size)
        chunks = AttentionBatch(
            slots=slots,
            page_table=rows.page_table[chunk_rows],
            seq_lens=chunk_lens,
            query_starts=chunk_starts,
            num_decodes=0,
            query_lens=[shape.tokens],
            context_lens=[],
        )
        batch = AttentionBatch(
            slots=slots,
            page_table=rows.page_table[decode_rows],
            seq_lens=decode_lens,
            query_starts=chunk_starts,
            num_decodes=shape.rows,
            query_lens=[],
            context_lens=[],
            chunks=chunks,
        )
        if (table := rows.window_table) is not None:
            slots = rows.slots(cells.token_rows, cells.positions, self._kv.page_size, table)
            batch.sliding = batch.over(slots, table[decode_rows])
            batch.sliding.chunks = chunks.over(slots, table[chunk_rows])
        drawn = rows.last_token[cells.token_rows]
        token_ids = torch.where(cells.token_ids < 0, drawn, cells.token_ids)
        sums = self._sums[: shape.tokens]
        hidden = self._decoder.forward(
            token_ids, cells.positions, batch, self._kv, cells.wanted, rehearsal, sums, adapters,
            self._states_of(cells, shape),
        )  # fmt: skip
        self._hidden[: shape.rows].copy_(hidden)
        rows.length.index_copy_(0, cells.rows, cells.lens)
        rows.length[rows.padding :].zero_()

    def _emptied(self, size: int) -> PrefillShape:
        """A shape, once the cells describe a step of nobody's that it takes."""
        shape = self._shapes[size]
        self._send(NOTHING, shape)
        return shape

    def _states_of(self, cells: StepCells, shape: PrefillShape) -> States | None:
        if self._states is None:
            return None
        batch = StateBatch(
            slots=cells.state_slots.to(torch.int32),
            sources=cells.state_sources.to(torch.int32),
            starts=cells.chunk_starts.to(torch.int32),
            positions=cells.positions,
            saves=cells.state_saves.to(torch.int32),
            num_decodes=shape.rows,
        )
        return States(self._states, batch)

    def _send(self, plan: StepPlan, shape: PrefillShape) -> None:
        cells = describe(plan, shape, self._rows.lengths, self._rows.padding, self._limit)
        if self._states is not None:
            cells = np.concatenate((cells, describe_states(plan, shape)))
        self._cells[: len(cells)].copy_(upload(cells, self._rows.device))
