"""Pure-decode steps as CUDA graphs: one forward pass per batch size, and the common draw behind it.

A graph reads everything from the rows on the device: which rows decode (`row_index`), their last tokens, lengths
and pages. Between two replays the host sends only what changed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.model.decoder import Decoder
from aengine.runtime.rows import Rows
from aengine.sampling.sampler import Draws, Sampler

WARM_UPS = 2


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending: a batch padded to the next one wastes at most 12 % of its rows."""
    sizes = [1]
    while sizes[-1] < max_rows:
        last = sizes[-1]
        # The smallest batch that the next size serves is last + 1.
        sizes.append(min(max_rows, max(last + 1, int((last + 1) / 0.88))))
    return sizes


@dataclass(slots=True)
class _Captured:
    forward: torch.cuda.CUDAGraph
    draw: torch.cuda.CUDAGraph
    logits: Tensor  # [size, vocab] float32
    draws: Draws


class DecodeGraphs:
    """Captures once, replays for any batch of at most `sizes[-1]` rows. All on the current stream."""

    def __init__(self, decoder: Decoder, kv: KVPool, sampler: Sampler, rows: Rows, sizes: list[int]) -> None:
        self._decoder = decoder
        self._kv = kv
        self._sampler = sampler
        self._rows = rows
        self.sizes = sizes
        self._row_index = torch.full((sizes[-1],), rows.padding, dtype=torch.int64, device=rows.device)
        self._current: list[int] = []  # what `_row_index` holds
        self._graphs: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()  # shared: only one graph runs at a time

    def capture(self, watch: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
        """Capture every size, the largest first so that the others fit into its memory. Waits for the device."""
        for size in watch(self.sizes[::-1]):
            self._graphs[size] = self._capture(size)

    def forward(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Replay the forward pass for these rows: logits [n, vocab] float32 and the rows as a tensor [n] int64.

        The logits stay valid until the next replay.
        """
        captured = self._graphs[self._size(len(rows))]
        self._send(rows)
        captured.forward.replay()
        return captured.logits[: len(rows)], self._row_index[: len(rows)]

    def draw(self, rows: list[int]) -> Draws:
        """Replay the simple draw behind `forward` of the same rows; it also feeds the ids back and advances lengths."""
        captured = self._graphs[self._size(len(rows))]
        captured.draw.replay()
        return Draws(captured.draws.token_ids[: len(rows)], captured.draws.finite[: len(rows)], None)

    def _size(self, n: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, n)]

    def _send(self, rows: list[int]) -> None:
        if rows == self._current:
            return
        size = self._size(len(rows))
        self._row_index[:size].copy_(self._rows.upload(rows + [self._rows.padding] * (size - len(rows))))
        self._current = list(rows)

    def _capture(self, size: int) -> _Captured:
        stream = torch.cuda.current_stream(self._rows.device)
        for _ in range(WARM_UPS):
            self._draw(self._forward(size), size)
        stream.synchronize()
        forward, draw = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, stream=stream):
            logits = self._forward(size)
        with torch.cuda.graph(draw, pool=self._pool, stream=stream):
            draws = self._draw(logits, size)
        return _Captured(forward, draw, logits, draws)

    def _forward(self, size: int) -> Tensor:
        rows = self._rows
        index = self._row_index[:size]
        positions = rows.length[index]
        attention = AttentionBatch(
            slots=rows.slots(index, positions, self._kv.page_size),
            page_table=rows.page_table[index],
            seq_lens=(positions + 1).to(torch.int32),
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=rows.device),
            num_decodes=size,
            query_lens=[1] * size,
            context_lens=[rows.page_table.shape[1] * self._kv.page_size] * size,
        )
        hidden = self._decoder.forward(rows.last_token[index], positions, attention, self._kv)
        return self._decoder.logits(hidden)

    def _draw(self, logits: Tensor, size: int) -> Draws:
        rows = self._rows
        index = self._row_index[:size]
        lengths = rows.length[index] + 1
        draws = self._sampler.draw_simple(logits, index, lengths)
        rows.last_token[index] = draws.token_ids
        rows.length[index] = lengths
        rows.length[rows.padding :].zero_()
        return draws
