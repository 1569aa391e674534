"""Drafts of an EAGLE-3 head for given states of its target, over several sequences in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.model.decoder import Decoder
from aengine.model.drafting.eagle3 import Eagle3Head
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.steps import Sequences


@dataclass(eq=False)
class Drafting:
    """A sequence: the states of the target and the ids after them, and what the head has computed."""

    states: Tensor  # [tokens, width]
    next_ids: list[int]
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)  # of each draft
    drafts: list[int] = field(default_factory=list)  # ids of the target
    recycled: Tensor | None = None


def random_states(settings: HeadSettings, lengths: Sequence[int]) -> list[Drafting]:
    """Return a sequence of each length."""
    generator = torch.Generator().manual_seed(7)
    width = len(settings.taps) * settings.target_hidden
    return [
        Drafting(
            3 * torch.randn(tokens, width, generator=generator),
            torch.randint(0, settings.target_vocab, (tokens,), generator=generator).tolist(),
        )
        for tokens in lengths
    ]


def head_of(decoder: Decoder) -> Eagle3Head:
    assert isinstance(decoder.draft_head, Eagle3Head)
    return decoder.draft_head


class Drafter:
    """Runs the head of a decoder over some sequences."""

    def __init__(self, decoder: Decoder, drafting: Sequence[Drafting]) -> None:
        self.head = head_of(decoder)
        self.drafting = drafting
        self.sequences = Sequences(decoder, len(drafting))

    def draft(self, drafts: int, chunk: int = 100) -> None:
        """Compute all states in chunks of at most this many tokens, and after each sequence this many drafts."""
        with torch.inference_mode():
            while any(one.computed < len(one.states) for one in self.drafting):
                self._prefill(chunk)
            for _ in range(drafts - 1):
                self.recycle()

    def _prefill(self, chunk: int) -> None:
        spans = [range(one.computed, min(one.computed + chunk, len(one.states))) for one in self.drafting]
        positions, batch = self.sequences.batch(spans)
        done = [i for i, one in enumerate(self.drafting) if spans[i] and spans[i].stop == len(one.states)]
        ids = torch.tensor([one.next_ids[p] for one, span in zip(self.drafting, spans) for p in span])
        states = torch.cat([one.states[span.start : span.stop] for one, span in zip(self.drafting, spans)])
        wanted = batch.query_starts[1:].long()[done] - 1
        self.run([self.drafting[i] for i in done], ids, states, positions, batch, wanted)
        for one, span in zip(self.drafting, spans):
            one.computed = span.stop

    def recycle(self) -> None:
        """Make one more draft of each sequence."""
        positions, batch = self.sequences.batch([range(one.computed, one.computed + 1) for one in self.drafting], True)
        ids = torch.tensor([one.drafts[-1] for one in self.drafting])
        states = torch.stack([one.recycled for one in self.drafting if one.recycled is not None])
        self.run(self.drafting, ids, states, positions, batch, None, recycled=True)
        for one in self.drafting:
            one.computed += 1

    def run(
        self,
        drafting: Sequence[Drafting],
        ids: Tensor,
        states: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        wanted: Tensor | None,
        recycled: bool = False,
    ) -> None:
        """Run the head, and append a draft to each of these sequences, whose last tokens are wanted."""
        drafted = self.head.forward(ids, states, positions, batch, self.sequences.kv, wanted, recycled)
        logits = self.head.logits(drafted.hidden)
        for one, row, state in zip(drafting, logits, drafted.states, strict=True):
            best = int(row.argmax())
            one.logits.append(row)
            one.drafts.append(best if self.head.token_ids is None else int(self.head.token_ids[best]))
            one.recycled = state.clone()
