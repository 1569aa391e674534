"""Turns a step's plan into the tensors that the decoder reads.

`describe` writes a plan as integers, with a fixed shape. `resolve` makes tensors from them on the device.
`StepTensors.forward` runs the decoder over these tensors. An eager step has a shape that fits it exactly. A captured
step is padded to the shape of its graph. For captured steps that only decode, the device makes the tensors itself
(`kernels/decodes`).

Lengths of rows advance when a step begins: on the device in `resolve` or in `DecodeKernels.begin`, on the host in
`Rows.advance`. The host never sends the length of a decoding row to the device. A row that verifies drafts advances
by all of them; `verdict.py` takes back those that are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.base import AttentionBatch, MutualTokens
from aengine.cache.kv import KVPool
from aengine.cache.states import StatePool
from aengine.kernels.recurrent.state import StateBatch
from aengine.model.blocks.step import ImageRows, States
from aengine.model.decoder import Decoder
from aengine.model.drafting.base import TapStates
from aengine.runtime.step.pooling import pooled_tokens
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.state_cells import StateCells, describe_states, fields
from aengine.step_plan import StepPlan

if TYPE_CHECKING:  # Triton
    from aengine.kernels.attention.prefix_attention import SharedRuns

MOST_CHUNKS = 72  # in a captured step; the scheduler admits fewer in one step


@dataclass(frozen=True, slots=True)
class StepShape:
    """The most tokens, sequences and results of a step.

    Rows of `StepPlan.decode` with one token are decodes. Those with drafts come after them, as the first chunks.
    """

    tokens: int
    decodes: int
    chunks: int
    wanted: int  # tokens whose hidden states are needed: tokens that draw, then tokens that are pooled
    has_padding: bool = False  # whether tokens of the padding row fill it up

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepShape:
        """Return the shape that fits a plan exactly."""
        chunks = _chunks(plan)
        decodes = len(plan.decode) + len(plan.prefill) - len(chunks)
        return cls(plan.num_tokens, decodes, len(chunks), len(plan.draw_rows) + len(pooled_tokens(plan)))

    @classmethod
    def padded(cls, tokens: int, max_rows: int, most_drafts: int) -> StepShape:
        """Return the shape of a captured step. Its last chunk holds the padding."""
        draws = min(tokens, max_rows * (1 + most_drafts))
        return cls(tokens, min(tokens, max_rows), min(tokens + 1, MOST_CHUNKS), draws, has_padding=True)

    @property
    def widths(self) -> list[int]:
        """The lengths of the fields of `StepCells`, without those of recurrent layers."""
        sequences = self.decodes + self.chunks
        return [self.tokens] * 4 + [sequences] * 2 + [sequences + 1] + [self.wanted] * 2

    @property
    def state_widths(self) -> list[int]:
        """The lengths of the last fields of `StepCells`, which are for recurrent layers."""
        return [self.decodes + self.chunks] * 2 + [self.tokens] + [self.decodes + self.chunks] * 3

    def has_room_for(self, plan: StepPlan) -> bool:
        """Return whether the plan's chunks and wanted tokens fit next to padding. The caller checks its tokens."""
        return len(_chunks(plan)) < self.chunks and len(plan.draw_rows) + plan.pooled <= self.wanted


@dataclass(slots=True)
class StepCells:
    """A step in int64 numbers, as `describe` writes them. The fields are views of one buffer on the device."""

    token_ids: Tensor  # [tokens]; 0 for tokens that only the device knows
    sources: Tensor  # [tokens]: where in `Rows.next_tokens` such a token is; for others, a place that holds 0
    positions: Tensor  # [tokens]: counted from the row's length before the step
    token_rows: Tensor  # [tokens]: the row of each token
    rows: Tensor  # [sequences]: decodes, then chunks
    lens: Tensor  # [sequences]: tokens in this step; -1 for a decode that is padding
    query_starts: Tensor  # [sequences + 1]: the first token of each sequence, then the number of tokens
    wanted: Tensor  # [wanted]: indices of tokens whose hidden states are needed
    draw_rows: Tensor  # [wanted]: the row of each draw; pooled tokens have none
    states: StateCells | None = None  # None: the model has no recurrent layers

    @classmethod
    def over(cls, buffer: Tensor, shape: StepShape, recurrent: bool) -> StepCells:
        """Split a buffer into the cells of a shape. The buffer may be longer."""
        widths, state_widths = shape.widths, shape.state_widths if recurrent else []
        parts = buffer[: sum(widths) + sum(state_widths)].split(widths + state_widths)
        cells = cls(*parts[: len(widths)])
        if recurrent:
            cells.states = StateCells(*parts[len(widths) :])
        return cells


def describe(plan: StepPlan, shape: StepShape, padding: int, limit: int, recurrent: bool) -> NDArray[np.int64]:
    """Return the numbers of `StepCells` as one array.

    Args:
        shape: A shape into which the plan fits.
        padding: The padding row. Unused tokens become a chunk at the start of this row.
        limit: How many tokens the padding row can hold.
        recurrent: Whether the model has recurrent layers.
    """
    cells = np.zeros(sum(shape.widths), dtype=np.int64)
    token_ids, sources, positions, token_rows, rows, lens, starts, wanted, draw_rows = fields(cells, shape.widths)
    chunks, first = _chunks(plan), shape.decodes
    decodes = len(plan.decode) + len(plan.prefill) - len(chunks)
    rows[:] = padding
    lens[:decodes], lens[decodes:first] = 1, -1
    token_rows[:decodes] = rows[:decodes] = plan.decode[:decodes]
    starts[:first] = np.minimum(np.arange(first), decodes)
    at = decodes
    for place, (row, count) in enumerate(chunks, first):
        rows[place], lens[place], starts[place] = row, count, at
        token_rows[at : at + count] = row
        positions[at : at + count] = np.arange(count)
        at += count
    starts[first + len(chunks) :] = shape.tokens
    if rest := shape.tokens - at:
        place = first + len(chunks)
        positions[at:] = np.arange(rest) % limit
        token_rows[at:] = padding
        lens[place], starts[place] = min(rest, limit), at
    at = plan.decode_tokens  # all of them draw; token i of a row has `positions` i, and is in `Rows.next_tokens[i]`
    sources[:at] = positions[:at] * (padding + 1) + token_rows[:at]
    sources[at:] = padding
    draws = list(range(at))
    for chunk in plan.prefill:
        count = len(chunk.token_ids)
        token_ids[at : at + count] = chunk.token_ids
        at += count
        if chunk.samples:
            draws += [at - 1] * (1 + len(chunk.forks))
    draw_rows[: len(draws)] = plan.draw_rows
    draws += pooled_tokens(plan)
    wanted[: len(draws)] = draws
    return np.concatenate((cells, describe_states(plan, shape.decodes, shape.state_widths))) if recurrent else cells


def _chunks(plan: StepPlan) -> list[tuple[int, int]]:
    """Return the row and the number of tokens of each sequence that is a chunk: rows with drafts, then prefill."""
    drafted = [(row, 1 + drafts) for row, drafts in zip(plan.decode, plan.drafts) if drafts]
    return drafted + [(chunk.row, len(chunk.token_ids)) for chunk in plan.prefill]


@dataclass(slots=True)
class StepTensors:
    """One step as the decoder reads it: decoding sequences with `decode_queries` tokens each, then chunks."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, as `Decoder.forward` takes them
    next_positions: Tensor  # [wanted] int64: the sequence position after each wanted token
    slots: Tensor  # [tokens] int64: where keys and values are written, page * page_size + offset
    page_table: Tensor  # [sequences, pages] int32
    seq_lens: Tensor  # [sequences] int32: lengths after the step
    query_starts: Tensor  # [sequences + 1] int32
    num_decodes: int
    wanted: Tensor | None = None  # [wanted] int64: tokens whose hidden states are needed; None: all, in order
    window_slots: Tensor | None = None  # like slots and page_table, for layers whose pages are in the window group
    window_table: Tensor | None = None
    adapters: Tensor | None = None  # [tokens] int32: the place of each token's adapter; None: no token has one
    states: StateBatch | None = None  # None: the model has no recurrent layers
    query_lens: list[int] = field(default_factory=list)  # as in `AttentionBatch`
    context_lens: list[int] = field(default_factory=list)
    decode_queries: int = 1
    shared: SharedRuns | None = None
    images: ImageRows | None = None  # None: the step has no tokens of images
    mutual: MutualTokens | None = None  # as in `AttentionBatch`

    def forward(
        self,
        decoder: Decoder,
        kv: KVPool,
        states: StatePool | None,
        sums: Tensor | None = None,
        rehearsal: bool = False,
        taps: TapStates | None = None,
    ) -> Tensor:
        """Run the decoder and return hidden states of wanted tokens, [wanted, hidden]. Args as in `Decoder.forward`."""
        return decoder.forward(
            self.token_ids,
            self.positions,
            self.batch(),
            kv,
            self.wanted,
            rehearsal,
            sums,
            self.adapters,
            None if states is None or self.states is None else States(states, self.states),
            taps,
            self.images,
        )

    def batch(self) -> AttentionBatch:
        """Return the sequences as attention reads them."""
        batch = AttentionBatch(
            slots=self.slots,
            page_table=self.page_table,
            seq_lens=self.seq_lens,
            query_starts=self.query_starts,
            num_decodes=self.num_decodes,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            decode_queries=self.decode_queries,
            shared=self.shared,
            mutual=self.mutual,
        )
        if self.window_slots is not None and self.window_table is not None:
            batch.sliding = batch.with_pages(self.window_slots, self.window_table)
        return batch


def resolve(
    cells: StepCells,
    shape: StepShape,
    rows: Rows,
    page_size: int,
    adapted: bool,
    width: int,
    before: Tensor | None = None,
) -> StepTensors:
    """Make tensors from the cells and the rows on the device, and advance the rows' lengths. No host sync.

    Args:
        adapted: Whether some token has an adapter.
        width: Columns of the page tables: the pages of the longest sequence.
        before: [rows] int64, the lengths before the step. If they are given, lengths do not advance again, and the
            `token_ids` of tokens that the host does not know are arbitrary. None: the step begins now.
    """
    token_rows, begins = cells.token_rows, before is None
    before = rows.length if before is None else before
    positions = before.index_select(0, token_rows) + cells.positions
    known = before.index_select(0, cells.rows)
    lens = known + cells.lens
    if begins:
        rows.set_lengths(cells.rows, lens, shape.has_padding)
    starts = cells.query_starts.to(torch.int32)
    window = rows.window_table
    states = None
    if begins and cells.states is not None:
        states = cells.states.resolve(cells.rows, starts[shape.decodes :], rows, positions, known, lens)
    return StepTensors(
        token_ids=cells.token_ids + rows.flat_tokens.index_select(0, cells.sources),
        positions=rows.rotary_positions(token_rows, positions),
        next_positions=positions.index_select(0, cells.wanted) + 1,
        slots=rows.slots(token_rows, positions, page_size),
        page_table=rows.page_table[:, :width].index_select(0, cells.rows),
        seq_lens=lens.to(torch.int32),
        query_starts=starts,
        num_decodes=shape.decodes,
        wanted=cells.wanted,
        window_slots=None if window is None else rows.slots(token_rows, positions, page_size, window),
        window_table=None if window is None else window[:, :width].index_select(0, cells.rows),
        adapters=rows.adapter[token_rows] if adapted and rows.adapter is not None else None,
        states=states,
    )


def host_lens(plan: StepPlan, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the number of each sequence's tokens in this step, and an upper bound of its length after the step.

    Call it before the lengths advance. lengths: the length of each row before the step, or an upper bound.
    """
    chunks = [len(chunk.token_ids) for chunk in plan.prefill]
    decodes = [1 + drafts for drafts in plan.drafts] or [1] * len(plan.decode)
    contexts = list(plan.contexts) or [lengths[row] + 1 for row in plan.decode]
    contexts += [chunk.start + count for chunk, count in zip(plan.prefill, chunks)]
    return decodes + chunks, contexts
