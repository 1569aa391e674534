"""Steps with prefill chunks as CUDA graphs: one forward pass for each number of tokens, for any mix of sequences.

For a step of a few hundred tokens, the host needs longer to launch the kernels than the device needs to run them. So
the forward pass is captured for some numbers of tokens. Buffers hold the row of each token and the end of each
chunk. A step is padded to the next size with tokens of the padding row, whose keys and values go into page 0.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from aengine.cache.kv import KVPool
from aengine.cache.states import StatePool
from aengine.model.decoder import Decoder
from aengine.model.drafting.base import Taps, TapStates
from aengine.runtime.cuda.recording import recorded
from aengine.runtime.step.cells import StepCells, StepShape, describe, resolve
from aengine.runtime.step.executor import HeadInputs, TokenPass
from aengine.runtime.step.rows import Rows
from aengine.sampling.upload import upload
from aengine.step_plan import StepPlan

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

NOTHING = StepPlan(step=0, new_rows=[], new_pages=[], decode=[], prefill=[], page_copies=[])
MOST_PADDING = 128  # tokens; more padding costs more than the launches
SPARSE = 2048  # tokens; from here on, sizes are twice as far apart


def prefill_sizes(close: int, mixed: int, most: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending.

    Up to `close`, every step fits a size with little padding. Two larger sizes follow: `mixed`, the most tokens of a
    step that both prefills and decodes, and `most`, the most tokens of any step. Such full steps are captured because
    many follow one another, and the host blocks if the launch queue cannot hold the kernels of two steps.

    Capturing one size takes about 25 ms at start-up, so sizes are sparser from SPARSE on. A step that would need more
    padding than MOST_PADDING is launched kernel by kernel.
    """
    sizes = {
        *range(16, 64, 16),
        *range(64, 256, 32),
        *range(256, 512, 64),
        *range(512, min(close + MOST_PADDING, SPARSE), MOST_PADDING),
        *range(SPARSE, close + 2 * MOST_PADDING, 2 * MOST_PADDING),
        -(-mixed // MOST_PADDING) * MOST_PADDING,
    }
    return [size for size in sorted(sizes) if size < most] + [most]


class PrefillGraphs:
    """Captures and replays steps with prefill chunks. All work is enqueued on the current stream."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        rows: Rows,
        sizes: list[int],
        fits: Callable[[int, Sequence[int], int], bool],
        pool: _POOL_HANDLE | None = None,
        states: StatePool | None = None,
        taps: Taps | None = None,
    ) -> None:
        """Args:
        fits: The `fits` method of the attention backend.
        pool: Memory shared by graphs that never run at the same time.
        states: The pool of recurrent layers.
        taps: The hidden states that a draft head reads. None: there is no head.
        """
        self._taps = taps
        self._states = states
        self._decoder = decoder
        self._kv = kv
        self._rows = rows
        self._pool = pool
        self.sizes = sizes
        self._fits = fits
        self._shapes = {size: StepShape.padded(size, rows.padding, rows.most_drafts) for size in sizes}
        largest = self._shapes[sizes[-1]]
        widest = sum(largest.widths) + sum(largest.state_widths)
        self._cells = torch.zeros(widest, dtype=torch.int64, device=rows.device)
        shape = (largest.wanted, decoder.config.hidden_size)
        self._hidden = torch.empty(shape, dtype=decoder.dtype, device=rows.device)
        self._draw_positions = torch.empty(largest.wanted, dtype=torch.int64, device=rows.device)
        # For a draft head: the hidden states that it reads, and the rows' lengths before the step.
        tapped = 0 if taps is None else sizes[-1]
        width = decoder.config.hidden_size * (1 if taps is None else max(1, len(taps.layers)))
        self._tapped = torch.empty((tapped, width), dtype=decoder.dtype, device=rows.device)
        self._before = torch.empty_like(rows.length)
        self._sums = torch.empty(sizes[-1], dtype=torch.float32, device=rows.device)
        # The key is the size, and whether tokens may have adapters.
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._adapted = [False] if rows.adapter is None else [False, True]
        # The last page of a row's table may be only partly usable.
        self._limit = max(1, (rows.page_table.shape[1] - 1) * kv.page_size)

    def rehearse(self, size: int) -> None:
        """Launch every kernel of one size, so that all are compiled and loaded before the recording."""
        shape = self._emptied(size)
        for adapted in self._adapted:
            self.forward(shape, adapted, rehearsal=True)

    def record(self, size: int) -> None:
        """Record one rehearsed size. Record the largest first, so that the others fit into its memory."""
        shape = self._emptied(size)
        for adapted in self._adapted:
            self._graphs[size, adapted] = graph = torch.cuda.CUDAGraph()
            with recorded(graph, self._pool):
                self.forward(shape, adapted)

    def shape_for(self, plan: StepPlan) -> StepShape | None:
        """Return the captured shape that the step fits into with little padding, or None."""
        tokens = plan.num_tokens
        place = bisect.bisect_left(self.sizes, tokens)
        if place == len(self.sizes) or self.sizes[place] - tokens > MOST_PADDING:
            return None
        if (self.sizes[place], False) not in self._graphs:  # start-up runs steps before it records
            return None
        shape = self._shapes[self.sizes[place]]
        contexts = [length for length, drafts in zip(plan.contexts, plan.drafts) if drafts]
        contexts += [chunk.start + len(chunk.token_ids) for chunk in plan.prefill] + [shape.tokens - tokens]
        return shape if shape.has_room_for(plan) and self._fits(shape.tokens, contexts, self._kv.page_size) else None

    def replay(self, plan: StepPlan, shape: StepShape) -> TokenPass:
        """Replay a step in the shape that `shape_for` returned. The results are valid until the next replay."""
        adapted = self._rows.has_adapters(plan)
        self._send(plan, shape)
        self._graphs[shape.tokens, adapted].replay()
        draws, tokens = len(plan.draw_rows), plan.num_tokens
        return TokenPass(
            hidden=self._hidden[: draws + plan.pooled],
            wanted=None,
            draw_rows=self._cells_of(shape).draw_rows[:draws],
            draw_positions=self._draw_positions[:draws],
            sums=self._sums[:tokens],
            adapted=adapted,
            inputs=None if self._taps is None else self._head_inputs(shape),
        )

    def _head_inputs(self, shape: StepShape) -> HeadInputs:
        """Return what a draft head reads of the step that was replayed last."""
        rows, cells = self._rows, self._cells_of(shape)
        width = rows.page_table.shape[1]
        tensors = resolve(cells, shape, rows, self._kv.page_size, adapted=False, width=width, before=self._before)
        states = self._tapped[: shape.tokens]
        return HeadInputs(cells.token_ids, cells.wanted, tensors.positions, tensors.batch(), states)

    def forward(self, shape: StepShape, adapted: bool = False, rehearsal: bool = False) -> None:
        """Run the step that the cells describe, and write into the buffers that `replay` returns."""
        rows, cells, taps = self._rows, self._cells_of(shape), self._taps
        states, tapped = self._tapped[: shape.tokens], None
        if taps is not None:
            self._before.copy_(rows.length)
            tapped = TapStates(taps.layers, states) if taps.layers else None
        tensors = resolve(cells, shape, rows, self._kv.page_size, adapted, rows.page_table.shape[1])
        sums = self._sums[: shape.tokens]
        if taps is not None and not taps.layers:
            tensors.wanted = None
        hidden = tensors.forward(self._decoder, self._kv, self._states, sums, rehearsal, tapped)
        if taps is not None and not taps.layers:
            states.copy_(hidden)
            hidden = hidden.index_select(0, cells.wanted)
        self._hidden[: shape.wanted].copy_(hidden)
        self._draw_positions[: shape.wanted].copy_(tensors.next_positions)

    def _emptied(self, size: int) -> StepShape:
        """Write a step without tokens into the cells, and return the shape of this size."""
        shape = self._shapes[size]
        self._send(NOTHING, shape)
        return shape

    def _cells_of(self, shape: StepShape) -> StepCells:
        return StepCells.over(self._cells, shape, self._states is not None)

    def _send(self, plan: StepPlan, shape: StepShape) -> None:
        numbers = describe(plan, shape, self._rows.padding, self._limit, self._states is not None)
        self._cells[: len(numbers)].copy_(upload(numbers, self._rows.device))
