"""Steps of decodes as CUDA graphs: for each step the host launches two graphs, not single kernels.

The first graph computes the last token and the drafts of each row, up to the logits. It is
captured for some numbers of rows, each with some numbers of drafts. The second graph draws at all places, decides which
drafts are kept, writes the results to host memory, and makes as many drafts for the next step. It is captured once for
each common kind of draw. For steps without drafts it is also captured without the proposer. So while no drafts pay,
a step costs as much as without speculation. Without a proposer, no step has drafts.

Graphs read their inputs on the device. Between two replays the host sends only changes.

All rows of a captured step have the same number of drafts. A row with fewer is padded (`kernels/decodes`), so a step
replays the graphs of its largest number. A step that makes more drafts than it verifies is padded as well.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.cache.states import StatePool
from aengine.kernels.decodes.base import DecodeInputs, DecodeKernels
from aengine.model.decoder import Decoder
from aengine.runtime.cuda.decode_buffers import SharedBuffers, StateBuffers
from aengine.runtime.cuda.decode_shapes import (
    CAPTURED_KINDS,
    LEAST_SHARERS,
    DecodeShape,
    EndKind,
    ForwardKind,
    shared_sizes,
)
from aengine.runtime.cuda.recording import non_owning_view, recorded
from aengine.runtime.speculation.base import Kept, Proposer, tap_states
from aengine.runtime.step.cells import StepTensors
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.sharded_draws import draw_in_graph
from aengine.runtime.step.written import TURNS, WrittenVerdicts
from aengine.sampling.sampler import Kind, Sampler
from aengine.step_plan import StepPlan

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


@dataclass(slots=True)
class DecodePass:
    """The results of the first graph."""

    inputs: DecodeInputs
    logits: Tensor  # [places, n] in the model's dtype; n: this rank's part of the vocabulary
    states: Tensor | None  # [places, width], for a proposer that reads hidden states


@dataclass(slots=True)
class _Captured:
    forward: dict[ForwardKind, torch.cuda.CUDAGraph]
    ends: dict[EndKind, torch.cuda.CUDAGraph]
    # Valid until the next replay.
    logits: Tensor  # as in `DecodePass`
    rows: Tensor  # [places] int64: the row of each draw
    positions: Tensor  # [places] int64: the position of each drawn token


class DecodeGraphs:
    """Captures and replays steps of decodes. All work is enqueued on the current stream."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        sampler: Sampler,
        rows: Rows,
        proposer: Proposer | None,
        kernels: DecodeKernels,
        shapes: Sequence[DecodeShape],
        pool: _POOL_HANDLE | None,
        states: StatePool | None,
    ) -> None:
        """Args:
        shapes: They contain shapes without drafts, of which the largest has all rows. Others need a proposer.
        pool: Memory shared by graphs that never run at the same time.
        states: The pool of recurrent layers.
        """
        self._decoder = decoder
        self._kv = kv
        self._sampler = sampler
        self._rows = rows
        self._proposer = proposer
        self._taps = None if proposer is None else proposer.taps
        self._kernels = kernels
        self.sizes = sorted(shapes, key=lambda shape: (shape.places, shape))
        self._counts = sorted({shape.drafts for shape in shapes})
        self._rows_of = {drafts: sorted(s.rows for s in shapes if s.drafts == drafts) for drafts in self._counts}
        device, most = rows.device, max(shape.rows for shape in shapes)
        # What the next replay reads: the rows, then how many drafts each verifies.
        self._cells = torch.zeros((2, most), dtype=torch.int64, device=device)
        self._cells[0] = rows.padding
        self._current: tuple[int, list[int], list[int]] = (0, [], [])  # the contents of `_cells`
        self._starts = {n: torch.arange(most + 1, device=device).mul_(1 + n).int() for n in self._counts}
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._host_turn = 0  # equals `_turn` after all work that is enqueued
        shape, pinned = (TURNS, most, 2 + self._counts[-1]), device.type == "cuda"
        self._written = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._graphs: dict[DecodeShape, _Captured] = {}
        self._shared = SharedBuffers(most, rows)
        # If all layers have windows, pages of a shared run may have been freed.
        shares = decoder.config.windows[0] is None
        self._shared_rows = shared_sizes(self._rows_of[0]) if shares else []
        self._pool = pool
        self._states = None if states is None else StateBuffers(states, rows, most, self.sizes[-1].places)

    def rehearse(self, shape: DecodeShape) -> None:
        """Launch every kernel of one shape, so that all are compiled and loaded before the recording."""
        self._send([], [], shape)  # the first copy of this kind loads a kernel
        self._shared.send(())
        if self._states is not None:
            self._states.clear()
        for kind in self._kinds(shape):
            passed = self.forward(shape, kind, rehearsal=True)
        for end in self._end_kinds(shape):
            self.end(passed, shape, end)
        self._turn.fill_(self._host_turn)

    def record(self, shape: DecodeShape) -> None:
        """Record one rehearsed shape. Record the largest first, so that the others fit into its memory."""
        plain, *others = self._kinds(shape)
        forward, ends = {plain: torch.cuda.CUDAGraph()}, {}
        with recorded(forward[plain], self._pool):
            passed = self.forward(shape, plain)
        for other in others:
            forward[other] = torch.cuda.CUDAGraph()
            with recorded(forward[other], self._pool):
                self.forward(shape, other, into=passed)
        for end in self._end_kinds(shape):
            ends[end] = torch.cuda.CUDAGraph()
            with recorded(ends[end], self._pool):
                self.end(passed, shape, end)
        kept = (passed.logits, passed.inputs.token_rows, passed.inputs.next_positions)
        self._graphs[shape] = _Captured(forward, ends, *map(non_owning_view, kept))

    def shape_for(self, plan: StepPlan) -> DecodeShape | None:
        """Return the captured shape for a step of decodes and the drafts that it makes. None: there is none."""
        drafts = max(plan.proposals, *plan.drafts) if plan.drafts else plan.proposals
        if not drafts and not self._rows.states_are_complete(plan.decode):
            drafts = 1  # a step without drafts cannot add the accepted ones of the step before to the states
        place = bisect.bisect_left(self._counts, drafts)
        return None if place == len(self._counts) else self._shape_of(plan, self._counts[place])

    def exact_shape_for(self, plan: StepPlan) -> DecodeShape | None:
        """Return the captured shape whose rows have as many drafts as each row of the plan. None: there is none."""
        drafts = plan.drafts[0] if plan.drafts else 0
        exact = drafts in self._rows_of and all(one == drafts for one in plan.drafts)
        exact = exact and (drafts > 0 or self._rows.states_are_complete(plan.decode))
        return self._shape_of(plan, drafts) if exact else None

    def _shape_of(self, plan: StepPlan, drafts: int) -> DecodeShape | None:
        rows, n = self._rows_of[drafts], len(plan.decode)
        if not drafts and self._reads_shared(plan):
            rows = self._shared_rows
        place = bisect.bisect_left(rows, n)
        shape = DecodeShape(rows[place], drafts) if place < len(rows) else None
        return shape if shape in self._graphs else None  # start-up runs steps before it records

    def _reads_shared(self, plan: StepPlan) -> bool:
        return bool(plan.shared) and len(plan.decode) >= LEAST_SHARERS and bool(self._shared_rows)

    def replay(self, plan: StepPlan, shape: DecodeShape, kind: Kind) -> WrittenVerdicts:
        """Replay a whole step in the shape that `shape_for` returned. kind: one of `CAPTURED_KINDS`."""
        end = EndKind(kind, self._proposer is not None and (plan.is_read or shape.drafts > 0))
        self._replay_forward(plan, shape).ends[end].replay()
        return WrittenVerdicts(self._written[self._host_turn, : len(plan.decode)], plan.drafts)

    def replay_forward(self, plan: StepPlan, shape: DecodeShape) -> tuple[Tensor, Tensor, Tensor]:
        """Replay the first graph of a step in the shape that `exact_shape_for` returned.

        Returns this rank's logits, the rows and the positions of the draws, in the order of `plan.draw_rows`. All are
        valid until the next replay.
        """
        captured, draws = self._replay_forward(plan, shape), len(plan.decode) * shape.queries
        return captured.logits[:draws], captured.rows[:draws], captured.positions[:draws]

    def _replay_forward(self, plan: StepPlan, shape: DecodeShape) -> _Captured:
        self._send(plan.decode, list(plan.drafts) or [0] * len(plan.decode), shape)
        shares = not shape.drafts and self._reads_shared(plan)
        if shares:
            self._shared.send(plan.shared)
        if self._states is not None:
            self._states.send(plan, shape.rows)
        captured = self._graphs[shape]
        captured.forward[ForwardKind(shares, self._rows.adapters_of(plan.decode) is not None)].replay()
        self._host_turn = (self._host_turn + 1) % TURNS
        return captured

    def _send(self, rows: list[int], drafts: list[int], shape: DecodeShape) -> None:
        if (shape.rows, rows, drafts) == self._current:
            return
        padding = shape.rows - len(rows)
        numbers = [*rows, *[self._rows.padding] * padding, *drafts, *[0] * padding]
        self._cells[:, : shape.rows].copy_(self._rows.upload(numbers).view(2, -1))
        self._current = (shape.rows, list(rows), drafts)

    def _kinds(self, shape: DecodeShape) -> list[ForwardKind]:
        """Return the variants of the forward pass that a shape has, the plainest first."""
        shared = [False, True] if not shape.drafts and shape.rows in self._shared_rows else [False]
        adapted = [False] if self._rows.adapter is None else [False, True]
        return [ForwardKind(*kind) for kind in itertools.product(shared, adapted)]

    def _end_kinds(self, shape: DecodeShape) -> list[EndKind]:
        """Return the variants of the second graph that a shape has.

        A shape with drafts has none without the proposer: steps with drafts that it does not read are rare.
        """
        read = [False] if self._proposer is None else [True] if shape.drafts else [True, False]
        return [EndKind(*kind) for kind in itertools.product(CAPTURED_KINDS, read)]

    def forward(
        self, shape: DecodeShape, kind: ForwardKind, rehearsal: bool = False, into: DecodePass | None = None
    ) -> DecodePass:
        """Compute the tokens of all rows. A graph captures this. into: the memory for the results; None: new memory."""
        rows, n, taps = self._rows, shape.rows, self._taps
        inputs = self._kernels.begin(
            self._cells[0, :n], self._cells[1, :n], shape.queries, rows.next_tokens, rows.length, rows.page_table,
            self._kv.page_size, rows.padding, self._turn, TURNS, rows.window_table,
            None if into is None else into.inputs,
        )  # fmt: skip
        tensors = self._tensors(inputs, shape, kind)
        states, pool = self._states, None
        if states is not None:
            starts = self._starts[shape.drafts][: n + 1]
            tensors.states, pool = states.batch(self._cells[0, :n], inputs, starts, shape.queries), states.pool
        tapped = tap_states(taps, shape.places, self._decoder)
        hidden = tensors.forward(self._decoder, self._kv, pool, rehearsal=rehearsal, taps=tapped)
        read = None if taps is None else hidden if tapped is None else tapped.states
        logits = self._decoder.shard_logits(hidden, tensors.adapters)
        if into is None:
            return DecodePass(inputs, logits, read)
        into.logits.copy_(logits)
        if into.states is not None and read is not None:
            into.states.copy_(read)
        return into

    def _tensors(self, inputs: DecodeInputs, shape: DecodeShape, kind: ForwardKind) -> StepTensors:
        rows = self._rows
        return StepTensors(
            token_ids=inputs.token_ids,
            positions=rows.rotary_positions(inputs.token_rows, inputs.positions),
            next_positions=inputs.next_positions,
            slots=inputs.slots,
            page_table=inputs.page_table,
            seq_lens=inputs.seq_lens,
            query_starts=self._starts[shape.drafts][: shape.rows + 1],
            num_decodes=shape.rows,
            decode_queries=shape.queries,
            window_slots=inputs.window_slots,
            window_table=inputs.window_table,
            adapters=rows.adapter[inputs.token_rows] if kind.adapted and rows.adapter is not None else None,
            shared=self._shared.runs(shape.rows) if kind.shared else None,
        )

    def end(self, passed: DecodePass, shape: DecodeShape, kind: EndKind) -> None:
        """Draw at all places, decide what rows keep, and make their next drafts. A graph captures this."""
        rows, row_index, drafts = self._rows, self._cells[0, : shape.rows], self._cells[1, : shape.rows]
        draw_rows, positions = passed.inputs.token_rows, passed.inputs.next_positions
        draws = draw_in_graph(self._decoder, self._sampler, passed.logits, draw_rows, positions, kind.draws)
        verdict = self._kernels.end(
            row_index, drafts, draws.token_ids, draws.finite, rows.next_tokens, rows.length, self._written, self._turn,
            rows.padding,
        )  # fmt: skip
        if self._proposer is None or not kind.is_read:
            return
        tokens = draws.token_ids.view(shape.rows, shape.queries)
        kept = Kept(row_index, tokens, verdict.counts, verdict.places, draws.token_ids)
        inputs = None
        if passed.states is not None:
            tensors = self._tensors(passed.inputs, shape, ForwardKind())
            inputs = HeadInputs(tensors.token_ids, None, tensors.positions, tensors.batch(), passed.states)
        self._proposer.propose(self._plan_of(shape), kept, rows, inputs)

    def _plan_of(self, shape: DecodeShape) -> StepPlan:
        """Return a plan for the proposer. Its contexts have the largest length that a row can have."""
        longest = self._rows.page_table.shape[1] * self._kv.page_size
        return StepPlan(
            step=0,
            new_rows=[],
            new_pages=[],
            decode=[self._rows.padding] * shape.rows,
            prefill=[],
            page_copies=[],
            drafts=[shape.drafts] * shape.rows if shape.drafts else (),
            contexts=[longest] * shape.rows,
            proposals=shape.drafts,
        )
