"""Describes the sequences of a step and the attention of a layer, and has the protocols of the backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import KVScales

if TYPE_CHECKING:
    from aengine.kernels.attention.prefix_attention import SharedRuns

P = TypeVar("P")

# Torch's attention on CUDA devices, without that of cuDNN, which compiles a kernel for each length.
_COMPILED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(slots=True)
class AttentionBatch:
    """The sequences of one step: first the decodes, then the prefill chunks.

    A sequence's query tokens are the last tokens of its context. Each sees the positions up to its own. All decodes
    have `decode_queries` query tokens: one, and the drafts that the step verifies, or those of a draft head's block. A
    padding row is a decode whose page table names page 0. Its length is 0, or less than `decode_queries`.

    A captured step may have more entries than sequences. Its unused decodes come last among the decodes. They have
    length -1 and no token. Only a `capturable` backend takes chunks in a captured step, because the host does
    not know their lengths.
    """

    slots: Tensor  # [tokens] int64: page * page_size + offset at which to write K and V; padding is in page 0
    page_table: Tensor  # [seqs, max_pages] int32; entries past a sequence's last page are undefined
    seq_lens: Tensor  # [seqs] int32: context lengths, this step's tokens included
    query_starts: Tensor  # [seqs + 1] int32: the first token of each sequence, then the number of tokens
    num_decodes: int
    query_lens: list[int]  # host copy; empty for a captured step
    context_lens: list[int]  # host copy of seq_lens, for decodes an upper bound; empty for a captured step
    decode_queries: int = 1  # query tokens of each decode
    # False: all query tokens of a decode see its whole context. Layers with a window or over latents do not support it.
    causal_decodes: bool = True
    # Runs of pages that several decodes share. A backend can read them once; it may also ignore them. The CUDA backend
    # ignores them if decodes have several query tokens.
    shared: SharedRuns | None = None
    mutual: MutualTokens | None = None  # None: all tokens attend causally
    # The same step for layers whose pages are in the window group. None: all layers use the same pages.
    sliding: AttentionBatch | None = None
    # Plans that a backend makes once per step, by their type and the layers' window. A caller that reuses this object
    # with other tensors or lengths must clear it.
    plans: dict[tuple[type, int | None], object] = field(default_factory=dict)

    def with_pages(self, slots: Tensor, page_table: Tensor) -> AttentionBatch:
        """Return the same step for the pages of another group of layers."""
        return replace(self, slots=slots, page_table=page_table, shared=None, plans={})

    @property
    def num_chunks(self) -> int:
        """Return the number of prefill chunks."""
        return len(self.seq_lens) - self.num_decodes

    @property
    def decode_tokens(self) -> int:
        """Return the number of the decodes' query tokens, which are the first ones of the step."""
        return self.num_decodes * self.decode_queries

    @property
    def most_queries(self) -> int:
        """Return an upper bound of the query tokens of one sequence."""
        return max(self.query_lens) if self.query_lens else len(self.slots)

    def chunks(self) -> AttentionBatch:
        """Return a batch of only the prefill chunks, in which all tokens attend causally.

        query_starts still count from the first token of the step.
        """
        first = self.num_decodes
        if not first and self.mutual is None:
            return self
        return self.plan(AttentionBatch, lambda: self._select(slice(first, None)))

    def chunk_range(self, first: int, last: int) -> AttentionBatch:
        """Return chunks first .. last - 1 of a batch without decodes. Their query_starts begin at 0."""
        chunks = self._select(slice(first, last))
        chunks.query_starts = self.query_starts[first : last + 1] - self.query_starts[first]
        return chunks

    def _select(self, seqs: slice) -> AttentionBatch:
        return replace(
            self,
            page_table=self.page_table[seqs],
            seq_lens=self.seq_lens[seqs],
            query_starts=self.query_starts[seqs],
            num_decodes=0,
            decode_queries=1,
            query_lens=self.query_lens[seqs],
            context_lens=self.context_lens[seqs],
            shared=None,
            mutual=None,
            sliding=None,
            plans={},
        )

    def unseen(self, window: int | None) -> Tensor:
        """Return how many tokens at the start of each context no query sees because of the window, [seqs] int32."""
        if window is None:
            return torch.zeros_like(self.seq_lens)
        return (self.seq_lens - self.query_starts.diff() - (window - 1)).clamp_(min=0)

    def seen_lens(self, window: int | None, multiple: int = 1) -> list[int]:
        """Return the length of each context without its unseen tokens. Empty for a captured step.

        multiple: round the number of unseen tokens down to a multiple of this.
        """
        if window is None:
            return self.context_lens
        return [
            context - max(0, context - queries - (window - 1)) // multiple * multiple
            for context, queries in zip(self.context_lens, self.query_lens)
        ]

    def for_window(self, window: int | None) -> AttentionBatch:
        """Return the batch whose pages belong to layers with this window."""
        return self if window is None or self.sliding is None else self.sliding

    def plan(self, kind: type[P], make: Callable[[], P], window: int | None = None) -> P:
        """Return the step's plan of this type. `make` makes it if there is none yet."""
        known = self.plans.get((kind, window))
        if not isinstance(known, kind):
            self.plans[kind, window] = known = make()
        return known


@dataclass(frozen=True, slots=True)
class MutualTokens:
    """Tokens of images that also see later ones: all tokens of one image see each other."""

    ends: Tensor  # [tokens] int64: the position after the last token of a token's image; 0 for tokens of text
    first: int  # the first sequence of the step that is a chunk of a prompt; earlier ones have no tokens of images
    everywhere: bool  # whether this is so in all layers; False: in those with a window

    def are_in(self, window: int | None) -> bool:
        """Return whether tokens see later ones in layers with this window."""
        return self.everywhere or window is not None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """The parameters of one layer's attention. A backend reads them once, when it binds the layer.

    Head h reads KV head h // (heads / kv_heads). The query at position p sees positions <= p. With a window w it sees
    only positions > p - w.
    """

    head_dim: int
    scale: float  # scores are q . k * scale; for an FP8 cache this includes the scale of keys
    window: int | None = None
    scores: Scores = PLAIN  # softcap and sinks
    value_scale: float = 1.0  # values are codes * value_scale; 1 unless the cache is FP8
    # > 0: all heads share one vector of a token, in a cache [pages, page_size, 1, dim]. The whole vector is the key,
    # and its first `latent_rank` numbers are the value. The caller passes the cache both as K and as V.
    latent_rank: int = 0

    def with_scales(self, scales: KVScales) -> AttentionLayer:
        """Return the same layer over an FP8 cache with these scales."""
        return replace(self, scale=self.scale * scales.key, value_scale=scales.value)


class Attend(Protocol):
    """The attention of one layer, bound to a backend."""

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, /) -> Tensor:
        """Attend causally, apart from `batch.mutual`. A sequence's queries are the last tokens of its context.

        Tokens of the pages after a context have no influence, even if they are NaN.

        Args:
            q: [tokens, heads, head_dim].
            k_cache, v_cache: [pages, page_size, kv_heads, head_dim], this step's K and V included.

        Returns [tokens, heads, head_dim], or [tokens, heads, latent_rank]. The values of a padding row are arbitrary,
        but finite if page 0 is finite.
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

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return attention of all tokens of a sequence to each other. All are [sequences, tokens, heads, dim]."""
        ...


class PrefillKernel(Protocol):
    """A kernel that attends for the prefill chunks of a step, all chunks in one call."""

    name: str
    why: str  # why this kernel was chosen, for the start-up log
    capturable: bool = False  # on the host it reads only max(query_lens), which may be an upper bound

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """Return whether a captured step of this many tokens can hold chunks with these contexts."""
        return self.capturable

    def bind(self, layer: AttentionLayer) -> Attend | None:
        """Return the causal attention of a layer's chunks, or None if the kernel does not support the layer.

        q holds all tokens of the step; the tokens of chunks come last. query_starts count from the first token of the
        step. The results for tokens before the chunks are undefined.
        """
        ...

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Like `AttentionBackend.attend_whole`."""
        return attend_whole(q, k, v, scale)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`AttentionBackend.attend_whole` with torch's kernels."""
    with sdpa_kernel(_COMPILED) if q.is_cuda else nullcontext():
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
