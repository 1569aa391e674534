"""Turns a step's plan into the tensors that the decoder reads.

`describe` writes a plan as integers, with a fixed shape. `resolve` makes tensors from them on the device.
`StepTensors.forward` runs the decoder over these tensors. An eager step has a shape that fits it exactly. A captured
step is padded to the shape of its graph. For captured steps that only decode, the device makes the tensors itself
(`kernels/row_steps.py`).

Lengths of rows advance when a step begins: on the device in `resolve` or in `begin_decode`, on the host in
`Rows.advance`. The host never sends the length of a decoding row to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from aengine.runtime.step.pooling import pooled_tokens
from aengine.runtime.step.rows import Rows
from aengine.step_plan import StepPlan

if TYPE_CHECKING:  # Triton
    from aengine.kernels.attention.prefix_attention import SharedRuns

MOST_CHUNKS = 72  # in a captured step; the scheduler admits fewer in one step


@dataclass(frozen=True, slots=True)
class StepShape:
    """The most tokens, sequences and results of a step."""

    tokens: int
    decodes: int
    chunks: int
    wanted: int  # tokens whose hidden states are needed: tokens that draw, then tokens that are pooled

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepShape:
        """Return the shape that fits a plan exactly."""
        wanted = len(plan.sampled_rows) + len(pooled_tokens(plan))
        return cls(plan.num_tokens, len(plan.decode), len(plan.prefill), wanted)

    @classmethod
    def padded(cls, tokens: int, max_rows: int) -> StepShape:
        """Return the shape of a captured step. Its last chunk holds the padding."""
        rows = min(tokens, max_rows)
        return cls(tokens, rows, min(tokens + 1, MOST_CHUNKS), rows)

    @property
    def widths(self) -> list[int]:
        """The lengths of the fields of `StepCells`, without those of recurrent layers."""
        sequences = self.decodes + self.chunks
        return [self.tokens] * 3 + [sequences] * 2 + [sequences + 1] + [self.wanted] * 2

    @property
    def state_widths(self) -> list[int]:
        """The lengths of the last fields of `StepCells`, which are for recurrent layers."""
        return [self.decodes + self.chunks] * 2 + [self.tokens]

    def has_room_for(self, plan: StepPlan) -> bool:
        """Return whether the plan's chunks and wanted tokens fit next to padding. The caller checks its tokens."""
        return len(plan.prefill) < self.chunks and len(plan.sampled_rows) + plan.pooled <= self.wanted


@dataclass(slots=True)
class StepCells:
    """A step in int64 numbers, as `describe` writes them. The fields are views of one buffer on the device."""

    token_ids: Tensor  # [tokens]; -1: the token that the row drew last, which only the device knows
    positions: Tensor  # [tokens]; for a token with id -1, counted from the end of its row
    token_rows: Tensor  # [tokens]: the row of each token
    rows: Tensor  # [sequences]: decodes, then chunks
    lens: Tensor  # [sequences]: decodes: tokens in this step, -1 for padding; chunks: the row's length after the step
    query_starts: Tensor  # [sequences + 1]: the first token of each sequence, then the number of tokens
    wanted: Tensor  # [wanted]: indices of tokens whose hidden states are needed
    draw_rows: Tensor  # [wanted]: the row of each draw; pooled tokens have none
    # For recurrent layers, as in `StateBatch`. Empty for other models.
    state_slots: Tensor  # [sequences]
    state_sources: Tensor  # [sequences]
    state_saves: Tensor  # [tokens]

    @classmethod
    def over(cls, buffer: Tensor, shape: StepShape, recurrent: bool) -> StepCells:
        """Split a buffer into the cells of a shape. The buffer may be longer."""
        widths = shape.widths + (shape.state_widths if recurrent else [0] * 3)
        return cls(*buffer[: sum(widths)].split(widths))


def describe(plan: StepPlan, shape: StepShape, padding: int, limit: int, recurrent: bool) -> NDArray[np.int64]:
    """Return the numbers of `StepCells` as one array.

    Args:
        shape: A shape into which the plan fits.
        padding: The padding row. Unused tokens become a chunk at the start of this row.
        limit: How many tokens the padding row can hold.
        recurrent: Whether the model has recurrent layers.
    """
    cells = np.zeros(sum(shape.widths), dtype=np.int64)
    token_ids, positions, token_rows, rows, lens, starts, wanted, draw_rows = np.split(
        cells, np.cumsum(shape.widths)[:-1]
    )
    decodes, first = len(plan.decode), shape.decodes
    rows[:] = padding
    lens[:decodes], lens[decodes:first] = 1, -1
    token_ids[:decodes] = -1
    token_rows[:decodes] = rows[:decodes] = plan.decode
    starts[:first] = np.minimum(np.arange(first), decodes)
    at = decodes
    draws = [(row, token) for token, row in enumerate(plan.decode)]
    for place, chunk in enumerate(plan.prefill, first):
        end, count = chunk.start + len(chunk.token_ids), len(chunk.token_ids)
        token_ids[at : at + count] = chunk.token_ids
        positions[at : at + count] = np.arange(chunk.start, end)
        token_rows[at : at + count] = rows[place] = chunk.row
        lens[place], starts[place] = end, at
        at += count
        if chunk.samples:
            draws += [(row, at - 1) for row in (chunk.row, *chunk.forks)]
    starts[first + len(plan.prefill) :] = shape.tokens
    if rest := shape.tokens - at:
        place = first + len(plan.prefill)
        positions[at:] = np.arange(rest) % limit
        token_rows[at:] = padding
        lens[place], starts[place] = min(rest, limit), at
    draw_rows[: len(draws)] = [row for row, _ in draws]
    of_wanted = [token for _, token in draws] + pooled_tokens(plan)
    wanted[: len(of_wanted)] = of_wanted
    return np.concatenate((cells, _describe_states(plan, shape))) if recurrent else cells


def _describe_states(plan: StepPlan, shape: StepShape) -> NDArray[np.int64]:
    """Return the cells of recurrent layers. Padding has no slot to continue in."""
    cells = np.zeros(sum(shape.state_widths), dtype=np.int64)
    slots, sources, saves = np.split(cells, np.cumsum(shape.state_widths)[:-1])
    decodes, first = len(plan.decode), shape.decodes
    slots[decodes:first] = -1
    slots[:decodes] = sources[:decodes] = [slot_of(row) for row in plan.decode]
    at = decodes
    for place, chunk in enumerate(plan.prefill, first):
        slots[place] = slot_of(chunk.row)
        sources[place] = slot_of(chunk.row) if chunk.start else 0  # position 0 starts with an empty state
        for count, slot in chunk.saves:
            saves[at + count - 1] = slot
        at += len(chunk.token_ids)
    return cells


@dataclass(slots=True)
class StepTensors:
    """One step as the decoder reads it: decoding sequences with one token each, then prefill chunks."""

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
    shared: SharedRuns | None = None

    def forward(
        self,
        decoder: Decoder,
        kv: KVPool,
        states: StatePool | None,
        sums: Tensor | None = None,
        rehearsal: bool = False,
    ) -> Tensor:
        """Run the decoder and return hidden states of wanted tokens, [wanted, hidden]. Args as in `Decoder.forward`."""
        batch = AttentionBatch(
            slots=self.slots,
            page_table=self.page_table,
            seq_lens=self.seq_lens,
            query_starts=self.query_starts,
            num_decodes=self.num_decodes,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            shared=self.shared,
        )
        if self.window_slots is not None and self.window_table is not None:
            batch.sliding = batch.with_pages(self.window_slots, self.window_table)
        return decoder.forward(
            self.token_ids,
            self.positions,
            batch,
            kv,
            self.wanted,
            rehearsal,
            sums,
            self.adapters,
            None if states is None or self.states is None else States(states, self.states),
        )


def resolve(cells: StepCells, shape: StepShape, rows: Rows, page_size: int, adapted: bool, width: int) -> StepTensors:
    """Make tensors from the cells and the rows on the device, and advance the rows' lengths. No host sync.

    Args:
        adapted: Whether some token has an adapter.
        width: Columns of the page tables: the pages of the longest sequence.
    """
    from_row = cells.token_ids < 0
    token_rows, decodes = cells.token_rows, shape.decodes
    token_ids = torch.where(from_row, rows.last_token[token_rows], cells.token_ids)
    positions = torch.where(from_row, rows.length[token_rows] + cells.positions, cells.positions)
    lens = torch.cat((rows.length[cells.rows[:decodes]] + cells.lens[:decodes], cells.lens[decodes:]))
    rows.set_lengths(cells.rows, lens)
    starts = cells.query_starts.to(torch.int32)
    window = rows.window_table
    return StepTensors(
        token_ids=token_ids,
        positions=rows.rotary_positions(token_rows, positions),
        next_positions=positions[cells.wanted] + 1,
        slots=rows.slots(token_rows, positions, page_size),
        page_table=rows.page_table[cells.rows, :width],
        seq_lens=lens.to(torch.int32),
        query_starts=starts,
        num_decodes=decodes,
        wanted=cells.wanted,
        window_slots=None if window is None else rows.slots(token_rows, positions, page_size, window),
        window_table=None if window is None else window[cells.rows, :width],
        adapters=rows.adapter[token_rows] if adapted and rows.adapter is not None else None,
        states=StateBatch(
            slots=cells.state_slots.to(torch.int32),
            sources=cells.state_sources.to(torch.int32),
            starts=starts[decodes:],
            positions=positions,
            saves=cells.state_saves.to(torch.int32),
            num_decodes=decodes,
        )
        if len(cells.state_slots)
        else None,
    )


def host_lens(plan: StepPlan, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the number of each sequence's tokens in this step, and an upper bound of its length after the step.

    lengths: the length of each row before the step, or an upper bound.
    """
    chunks = [len(chunk.token_ids) for chunk in plan.prefill]
    contexts = [lengths[row] + 1 for row in plan.decode]
    contexts += [chunk.start + count for chunk, count in zip(plan.prefill, chunks)]
    return [1] * len(plan.decode) + chunks, contexts
