"""What attention computes: a step's sequences, a layer, and the protocols of the backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import KVScales

if TYPE_CHECKING:
    from aengine.kernels.attention.prefix_attention import SharedRuns

P = TypeVar("P")


@dataclass(slots=True)
class AttentionBatch:
    """The sequences of one step: first the decodes, with one query token each, then the prefill chunks.

    A sequence's query tokens are the last tokens of its context. A padding row is a decode of length 0 whose page
    table names page 0.

    A captured step has room for more sequences than it holds. Its unused decodes come last among the decodes and have
    length -1; they have no token. Only a `capturable` backend takes chunks in a captured step, because the host does
    not know their lengths.
    """

    slots: Tensor  # [tokens] int64: where each token's K/V goes, page * page_size + offset; padding: inside page 0
    page_table: Tensor  # [seqs, max_pages] int32; entries past a sequence's last page are undefined
    seq_lens: Tensor  # [seqs] int32: context lengths, this step's tokens included
    query_starts: Tensor  # [seqs + 1] int32: the first token of each sequence, then the number of tokens
    num_decodes: int
    query_lens: list[int]  # host copy; empty for a captured step
    context_lens: list[int]  # host copy of seq_lens, for decodes an upper bound; empty for a captured step
    # Runs of pages that several decodes share. A backend can read them once; it may also ignore them.
    shared: SharedRuns | None = None
    # The same step for layers whose pages are in the window group. None: all layers use the same pages.
    sliding: AttentionBatch | None = None
    # Plans that a backend makes once per step, by their type and the layers' window. A caller that reuses this object
    # with other tensors or lengths must clear it.
    plans: dict[tuple[type, int | None], object] = field(default_factory=dict)

    def with_pages(self, slots: Tensor, page_table: Tensor) -> AttentionBatch:
        """Return the same step over the pages of another group."""
        return replace(self, slots=slots, page_table=page_table, shared=None, plans={})

    @property
    def num_chunks(self) -> int:
        """Return the number of prefill chunks."""
        return len(self.seq_lens) - self.num_decodes

    @property
    def most_queries(self) -> int:
        """Return an upper bound of the query tokens of one sequence."""
        return max(self.query_lens) if self.query_lens else len(self.slots)

    def chunks(self) -> AttentionBatch:
        """Return the prefill chunks alone. Their query_starts count from the first token of the step."""
        first = self.num_decodes
        if not first:
            return self
        return self.plan(AttentionBatch, lambda: self._part(slice(first, None)))

    def part(self, first: int, last: int) -> AttentionBatch:
        """Return some sequences of a step without decodes, with query_starts from 0."""
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
        """Return how many tokens at the start of each context are outside every query's window, [seqs] int32."""
        if window is None:
            return torch.zeros_like(self.seq_lens)
        return (self.seq_lens - self.query_starts.diff() - (window - 1)).clamp_(min=0)

    def seen_lens(self, window: int | None, multiple: int = 1) -> list[int]:
        """Return the length of each context without its unseen tokens. Empty if the host knows no contexts.

        multiple: round the number of unseen tokens down to a multiple of this.
        """
        if window is None:
            return self.context_lens
        return [
            context - max(0, context - queries - (window - 1)) // multiple * multiple
            for context, queries in zip(self.context_lens, self.query_lens)
        ]

    def for_window(self, window: int | None) -> AttentionBatch:
        """Return the step as layers with this window see it."""
        return self if window is None or self.sliding is None else self.sliding

    def plan(self, kind: type[P], make: Callable[[], P], window: int | None = None) -> P:
        """Return the step's plan of this type, and call `make` if there is none yet."""
        known = self.plans.get((kind, window))
        if not isinstance(known, kind):
            self.plans[kind, window] = known = make()
        return known


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """What one layer's attention computes. A backend reads it once, when it binds the layer.

    Head h reads KV head h // (heads / kv_heads). The query at position p sees positions <= p. With a window w it sees
    only positions > p - w.
    """

    head_dim: int
    scale: float  # scores are q . k * scale; for an FP8 cache this includes the scale of keys
    window: int | None = None
    scores: Scores = PLAIN  # softcap and sinks
    value_scale: float = 1.0  # values are codes * value_scale; 1 unless the cache is FP8
    # > 0: all heads share one vector of a token, in a cache [pages, page_size, 1, dim]. The whole vector is the key,
    # and its first `latent_rank` numbers are the value. The caller passes the cache as K and as V.
    latent_rank: int = 0

    def with_scales(self, scales: KVScales) -> AttentionLayer:
        """Return the same layer over an FP8 cache with these scales."""
        return replace(self, scale=self.scale * scales.key, value_scale=scales.value)


class Attend(Protocol):
    """The attention of one layer, bound to a backend."""

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, /) -> Tensor:
        """Attend causally, aligned to the ends of contexts.

        Other contents of the pages, even NaN, have no influence.

        Args:
            q: [tokens, heads, head_dim].
            k_cache, v_cache: [pages, page_size, kv_heads, head_dim], this step's K and V included.

        Returns [tokens, heads, head_dim], or [tokens, heads, latent_rank]. The values of a padding row are arbitrary,
        but finite if page 0 is.
        """
        ...


class AttentionBackend(Protocol):
    """Binds the layers of a model to kernels."""

    @property
    def name(self) -> str:
        """The name in the start-up log."""
        ...

    def bind(self, layer: AttentionLayer) -> Attend:
        """Choose the kernels of a layer. Their packages may be imported later."""
        ...


class PrefillKernel(Protocol):
    """A kernel that attends for the prefill chunks of a step, all chunks in one call."""

    name: str
    why: str  # why this kernel was chosen, for the start-up log
    capturable: bool = False  # reads nothing on the host but max(query_lens), which may be an upper bound

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """Return whether a captured step of this many tokens can hold chunks with these contexts."""
        return self.capturable

    def bind(self, layer: AttentionLayer) -> Attend | None:
        """Return the attention of a layer's chunks, or None if the kernel does not support the layer.

        q holds the tokens of the whole step, and the tokens of chunks come last. query_starts count from the first.
        The results for tokens before the chunks are undefined.
        """
        ...
