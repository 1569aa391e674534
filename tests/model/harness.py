"""A minimal engine for tests: a decoder, a KV pool and attention batches, without scheduler or sampler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.cache.snapshots import SnapshotRoom, slot_of
from aengine.cache.states import StatePool, StateRoom
from aengine.kernels.recurrent.state import StateBatch
from aengine.model.blocks.step import ImageRows, States
from aengine.model.decoder import Decoder


@dataclass
class Running:
    """A sequence: its known tokens, the pages of their KV, and how many tokens are computed."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)  # of each drawn token, [vocab]
    adapter: int = 0  # its place; 0: none
    row: int | None = None  # its state is in this row's slot


class Harness:
    """Greedy decoding over shuffled pages, in steps that mix decodes and prefill chunks."""

    def __init__(self, decoder: Decoder, page_size: int, num_pages: int = 400, seed: int = 0) -> None:
        self.decoder = decoder
        self.random = random.Random(seed)
        self.page_size = page_size
        self.kv = KVPool(decoder.config.kv_shape(page_size, decoder.kv_dtype), num_pages, decoder.device)
        # Contents that former owners left in a page must not have any influence.
        self.kv.data.fill_(float("nan"))
        shape = decoder.config.state_shape(torch.float32, decoder.dtype)
        self.states = None if shape is None else StatePool(StateRoom(shape, 199, SnapshotRoom()), decoder.device)
        self.rows = list(range(199))
        self.random.shuffle(self.rows)
        self.free = list(range(1, num_pages))
        self.random.shuffle(self.free)

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, batch: int = 16, chunk: int | None = None
    ) -> list[Running]:
        """Continue each prompt by `new_tokens` tokens.

        batch: how many run at once at most. chunk: prompts are computed in pieces of 1 to `chunk` tokens, in steps with
        the decodes of other sequences.
        """
        return self.run([Running(list(prompt)) for prompt in prompts], new_tokens, batch, chunk)

    def run(
        self, sequences: list[Running], new_tokens: int, batch: int = 16, chunk: int | None = None
    ) -> list[Running]:
        waiting, running = list(sequences), []
        while waiting or running:
            while waiting and len(running) < batch:
                running.append(waiting.pop(0))
            work = []
            for sequence in running:
                todo = len(sequence.tokens) - sequence.computed
                is_decode = bool(sequence.logits)
                work.append(
                    (sequence, todo if is_decode or chunk is None else self.random.randint(1, min(todo, chunk)))
                )
            self.step(work)
            running = [sequence for sequence in running if len(sequence.logits) < new_tokens]
        return sequences

    def states_of(self, spans: Sequence[tuple[Running, range]], positions: Tensor) -> States | None:
        if self.states is None:
            return None
        for sequence, _ in spans:
            sequence.row = self.rows.pop() if sequence.row is None else sequence.row
        slots = [slot_of(sequence.row or 0) for sequence, _ in spans]
        chunks = [len(span) for sequence, span in spans if not sequence.logits]
        decodes = len(spans) - len(chunks)
        batch = StateBatch(
            slots=torch.tensor(slots, dtype=torch.int32),
            sources=torch.tensor(
                [slot if span.start else 0 for slot, (_, span) in zip(slots, spans)], dtype=torch.int32
            ),
            starts=torch.tensor([decodes, *chunks]).cumsum(0).to(torch.int32),
            positions=positions,
            saves=torch.zeros(len(positions), dtype=torch.int32),
            num_decodes=decodes,
        )
        return States(self.states, batch)

    def seen(self, spans: Sequence[tuple[Running, range]], positions: Tensor) -> tuple[Tensor, ImageRows | None]:
        """Return the positions by which tokens are rotated, and the embeddings of images among them."""
        return positions, None

    def step(self, work: Sequence[tuple[Running, int]]) -> None:
        """Compute known tokens of each sequence, as many as `work` says. A sequence without more draws the next."""
        work = sorted(work, key=lambda item: not item[0].logits)  # decodes first
        page = self.page_size
        for sequence, count in work:
            while len(sequence.pages) * page < sequence.computed + count:
                sequence.pages.append(self.free.pop())
        spans = [(sequence, range(sequence.computed, sequence.computed + count)) for sequence, count in work]
        width = max(len(sequence.pages) for sequence, _ in spans)
        query_lens = [len(span) for _, span in spans]
        context_lens = [span.stop for _, span in spans]
        attention = AttentionBatch(
            slots=torch.tensor([seq.pages[p // page] * page + p % page for seq, span in spans for p in span]),
            page_table=torch.tensor(
                [seq.pages + [0] * (width - len(seq.pages)) for seq, _ in spans], dtype=torch.int32
            ),
            seq_lens=torch.tensor(context_lens, dtype=torch.int32),
            query_starts=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
            num_decodes=sum(1 for sequence, _ in spans if sequence.logits),
            query_lens=query_lens,
            context_lens=context_lens,
        )
        ids = torch.tensor([sequence.tokens[p] for sequence, span in spans for p in span])
        positions = torch.tensor([p for _, span in spans for p in span])
        turned, images = self.seen(spans, positions)
        adapters, last = None, attention.query_starts[1:].long() - 1
        if any(sequence.adapter for sequence, _ in spans):
            adapters = torch.tensor([sequence.adapter for sequence, span in spans for _ in span], dtype=torch.int32)
        with torch.inference_mode():
            states = self.states_of(spans, positions)
            hidden = self.decoder.forward(
                ids, turned, attention, self.kv, adapters=adapters, states=states, images=images
            )
            logits = self.decoder.logits(hidden[last], None if adapters is None else adapters[last])
        for (sequence, span), row, drawn in zip(spans, logits, logits.argmax(-1).tolist()):
            sequence.computed = span.stop
            if span.stop == len(sequence.tokens):
                sequence.logits.append(row)
                sequence.tokens.append(drawn)
