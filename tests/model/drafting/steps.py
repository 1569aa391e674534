"""Steps of a decoder and its draft head over several sequences, in a paged cache."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.cache.snapshots import SnapshotRoom, slot_of
from aengine.cache.states import StatePool, StateRoom
from aengine.kernels.recurrent.state import StateBatch
from aengine.model.blocks.step import States
from aengine.model.decoder import Decoder

_PAGE = 4
_PAGES = 16  # of each sequence


class Sequences:
    """The pages and states of some sequences, whose pages are shuffled."""

    def __init__(self, decoder: Decoder, count: int) -> None:
        pages = list(range(1, 1 + count * _PAGES))
        random.Random(0).shuffle(pages)
        self._pages = [pages[i * _PAGES : (i + 1) * _PAGES] for i in range(count)]
        self.kv = KVPool(decoder.config.kv_shape(_PAGE, decoder.kv_dtype), len(pages) + 1, decoder.device)
        self.kv.data.fill_(float("nan"))  # contents of former owners must not matter
        shape = decoder.config.state_shape(torch.float32, decoder.dtype)
        room = None if shape is None else StateRoom(shape, count + 1, SnapshotRoom())
        self._states = None if room is None else StatePool(room, decoder.device)

    def batch(self, spans: Sequence[range], decodes: bool = False) -> tuple[Tensor, AttentionBatch]:
        """Return positions and batch of a step that computes a range of positions of each sequence."""
        lengths = [len(span) for span in spans]
        ends = [span.stop for span in spans]
        slots = [self._pages[i][p // _PAGE] * _PAGE + p % _PAGE for i, span in enumerate(spans) for p in span]
        batch = AttentionBatch(
            slots=torch.tensor(slots),
            page_table=torch.tensor(self._pages, dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            query_starts=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            num_decodes=len(spans) if decodes else 0,
            query_lens=lengths,
            context_lens=ends,
        )
        return torch.tensor([p for span in spans for p in span]), batch

    def states(self, spans: Sequence[range], positions: Tensor) -> States | None:
        """Return the recurrent states of a step of prompts, or None if the model has none."""
        if self._states is None:
            return None
        slots = [slot_of(i) for i in range(len(spans))]
        batch = StateBatch(
            slots=torch.tensor(slots, dtype=torch.int32),
            sources=torch.tensor([slot if span.start else 0 for slot, span in zip(slots, spans)], dtype=torch.int32),
            starts=torch.tensor([0, *(len(span) for span in spans)]).cumsum(0).to(torch.int32),
            positions=positions,
            saves=torch.zeros(len(positions), dtype=torch.int32),
            num_decodes=0,
        )
        return States(self._states, batch)
