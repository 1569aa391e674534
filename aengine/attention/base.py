"""A step as attention sees it, and the protocol of the backends that compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from aengine.kernels.attention.heads import PLAIN, Scores

if TYPE_CHECKING:
    from aengine.kernels.attention.prefix_attention import SharedRuns

P = TypeVar("P")


@dataclass(slots=True)
class AttentionBatch:
    """The sequences of one step: first the decodes (one query token each), then the prefill chunks.

    A sequence's query tokens are the last ones of its context. A padding row is a decode of length 0
    whose page table names page 0.

    A captured step has room for more sequences than there are. Decodes that do not exist come last among the decodes
    and have length -1: the i-th token is then a chunk's. Only a `capturable` backend takes chunks in such a step, whose
    numbers the device alone knows.
    """

    slots: Tensor  # [tokens] int64: where each token's K/V goes, page * page_size + offset; padding: inside page 0
    page_table: Tensor  # [seqs, max_pages] int32; entries past a sequence's last page mean nothing
    seq_lens: Tensor  # [seqs] int32: context lengths, this step's tokens included
    query_starts: Tensor  # [seqs + 1] int32: where each sequence's tokens start, and their total
    num_decodes: int
    query_lens: list[int]  # host copy; empty for a captured step
    context_lens: list[int]  # host copy of seq_lens, of decodes an upper bound; empty for a captured step
    # Runs of pages that several decodes share, for a backend that can read them once; it may ignore them.
    shared: SharedRuns | None = None
    # The same step for layers with a window whose pages are of a group of their own; None: they share those of others.
    sliding: AttentionBatch | None = None
    # What a backend works out once per step, for all layers or for those of one window: by what it is. Belongs to the
    # backend: a step that reuses this object with other tensors or lengths clears it.
    plans: dict[tuple[type, int | None], object] = field(default_factory=dict)

    def over(self, slots: Tensor, page_table: Tensor) -> AttentionBatch:
        """The same step over the pages of another group."""
        return replace(self, slots=slots, page_table=page_table, shared=None, plans={})

    @property
    def num_chunks(self) -> int:
        """Return the number of sequences that are no decodes."""
        return len(self.seq_lens) - self.num_decodes

    @property
    def most_queries(self) -> int:
        """Return a bound of the query tokens of one sequence."""
        return max(self.query_lens) if self.query_lens else len(self.slots)

    def chunks(self) -> AttentionBatch:
        """Return the prefill chunks alone. Their query_starts count from the first token of the step."""
        first = self.num_decodes
        if not first:
            return self
        return self.plan(AttentionBatch, lambda: self._part(slice(first, None)))

    def part(self, first: int, last: int) -> AttentionBatch:
        """Return some of the sequences of a step without decodes, with query_starts from 0."""
        part = self._part(slice(first, last))
        part.query_starts = self.query_starts[first : last + 1] - self.query_starts[first]
        return part

    def _part(self, part: slice) -> AttentionBatch:
        return replace(
            self,
            page_table=self.page_table[part],
            seq_lens=self.seq_lens[part],
            query_starts=self.query_starts[part],
            num_decodes=0,
            query_lens=self.query_lens[part],
            context_lens=self.context_lens[part],
            shared=None,
            sliding=None,
            plans={},
        )

    def unseen(self, window: int | None) -> Tensor:
        """Return how many tokens at the start of each context no query of the step sees, [seqs] int32."""
        if window is None:
            return torch.zeros_like(self.seq_lens)
        return (self.seq_lens - self.query_starts.diff() - (window - 1)).clamp_(min=0)

    def seen_lens(self, window: int | None, multiple: int = 1) -> list[int]:
        """Return how long each context is without what `unseen` counts; without contexts on the host an empty list.

        multiple: Leave out only so many tokens of the unseen ones that their number is a multiple of this.
        """
        if window is None:
            return self.context_lens
        return [
            context - max(0, context - queries - (window - 1)) // multiple * multiple
            for context, queries in zip(self.context_lens, self.query_lens)
        ]

    def of(self, window: int | None) -> AttentionBatch:
        """The step as layers with this window see it."""
        return self if window is None or self.sliding is None else self.sliding

    def plan(self, kind: type[P], make: Callable[[], P], window: int | None = None) -> P:
        """The plan of this kind, made by the first layer that asks."""
        known = self.plans.get((kind, window))
        if not isinstance(known, kind):
            self.plans[kind, window] = known = make()
        return known


class AttentionBackend(Protocol):
    """Causal attention of a step's queries over their sequences' cached K and V."""

    @property
    def name(self) -> str:
        """For the start-up log."""
        ...

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        value_scale: float = 1.0,
        scores: Scores = PLAIN,
    ) -> Tensor:
        """q [tokens, heads, dim]; caches [pages, page_size, kv_heads, dim], this step's K and V written.

        Scores are q . k * scale. FP8 caches hold codes: the scale of keys is part of `scale`, values are codes times
        `value_scale`, which means nothing for other caches.

        scores: what becomes of them besides.

        Head h reads KV head h // (heads / kv_heads). The query at position p sees positions <= p, with a
        window w only those > p - w. What other sequences or earlier owners left in the pages has no
        influence, not even NaN. Returns [tokens, heads, dim]; a padding row's values are arbitrary but
        finite while page 0 is.
        """
        ...

    def over_latents(
        self, q: Tensor, cache: Tensor, rank: int, batch: AttentionBatch, scale: float, value_scale: float = 1.0
    ) -> Tensor:
        """The same where all heads share one vector of a token, cache [pages, page_size, 1, dim], as their key, and its
        first `rank` numbers as their value: [tokens, heads, rank]."""
        ...
