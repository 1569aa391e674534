"""Attention on CUDA devices: our paged kernels for decodes, a prefill kernel for prefill chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from aengine.attention.base import Attend, AttentionBatch, AttentionLayer, PrefillKernel
from aengine.kernels.attention.chunk_attention import attend_chunks
from aengine.kernels.attention.decode_attention import PagedDecode
from aengine.kernels.attention.latent_decode import LatentDecode
from aengine.kernels.attention.prefix_attention import attend_shared


class TritonAttention:
    """The backend of CUDA devices.

    A step of decodes alone reads nothing on the host, so a CUDA graph can hold it.
    """

    def __init__(self, prefill: Callable[[], PrefillKernel], capturable: bool = False) -> None:
        """Args:
        prefill: Returns the prefill kernel when it is first needed. Its packages take seconds to import.
            `TritonPrefill` replaces it for layers that it does not support. Layers over latents never use it.
        capturable: Whether `TritonPrefill` replaces a kernel that reads lengths on the host.
        """
        self.decode = PagedDecode()
        self.decode_latents = LatentDecode()
        self._get_prefill = prefill
        self._own_prefill = TritonPrefill()
        self._must_be_capturable = capturable
        # One layer for each (head_dim, plain scores). Layers over latents are not included.
        self._kinds: dict[tuple[int, bool], AttentionLayer] = {}

    def bind(self, layer: AttentionLayer) -> Attend:
        if layer.latent_rank:
            return LatentLayer(self, layer)
        self._kinds[layer.head_dim, layer.scores.plain] = layer
        return PagedLayer(self, layer)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._prefill.attend_whole(q, k, v, scale)

    def bind_prefill(self, layer: AttentionLayer) -> Attend:
        """Return the attention of a layer's prefill chunks. Waits until the prefill kernel is imported."""
        return self._prefill.bind(layer) or self._own_prefill.bind(layer)

    @cached_property
    def _prefill(self) -> PrefillKernel:
        kernel = self._get_prefill()
        return self._own_prefill if self._must_be_capturable and not kernel.capturable else kernel

    # The properties below are read at start-up, after all layers are bound.

    @property
    def name(self) -> str:
        return f"Triton (decode), {' and '.join(kernel.name for kernel in self._used)} (prefill)"

    @property
    def why(self) -> str:
        """The reason for the choice of prefill kernels, for the start-up log."""
        if not self._kinds:
            return "no flash kernel reads latents"
        reasons = [self._prefill.why] if self._prefill in self._used else []
        if self._unsupported:
            kinds = (
                f"heads of {dim}{'' if plain else ' with sinks or capped scores'}" for dim, plain in self._unsupported
            )
            reasons.append(f"{self._prefill.name} is not for {', '.join(kinds)}")
        return "; ".join(reasons)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a step with prefill chunks."""
        return all(kernel.capturable for kernel in self._used)

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """Return whether a captured step of this many tokens can hold chunks with these contexts."""
        return all(kernel.fits(tokens, contexts, page_size) for kernel in self._used)

    @cached_property
    def _used(self) -> list[PrefillKernel]:
        if len(self._unsupported) == len(self._kinds):
            return [self._own_prefill]
        return [self._prefill, self._own_prefill] if self._unsupported else [self._prefill]

    @cached_property
    def _unsupported(self) -> list[tuple[int, bool]]:
        """The kinds of layers that the prefill kernel does not support."""
        return sorted(kind for kind, layer in self._kinds.items() if self._prefill.bind(layer) is None)


class PagedLayer:
    """A layer whose cache holds keys and values."""

    def __init__(self, backend: TritonAttention, layer: AttentionLayer) -> None:
        self._backend = backend
        self._decode = backend.decode
        self._layer = layer
        self._reads_shared = layer.window is None and layer.scores.plain

    @cached_property
    def _prefill(self) -> Attend:
        return self._backend.bind_prefill(self._layer)

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, /) -> Tensor:
        layer, queries = self._layer, batch.decode_queries
        if not batch.num_chunks:
            shared = None
            if batch.shared is not None and self._reads_shared and queries == 1:
                shared = attend_shared(q, k_cache, v_cache, batch.page_table, batch.shared, layer.scale)
            return self._decode(
                q, k_cache, v_cache, batch.page_table, batch.seq_lens, layer.scale, layer.window, shared,
                value_scale=layer.value_scale, scores=layer.scores, queries=queries, causal=batch.causal_decodes,
            )  # fmt: skip
        out = self._prefill(q, k_cache, v_cache, batch.chunks())
        if (mutual := batch.mutual) is not None and mutual.are_in(layer.window):
            # No prefill kernel lets tokens see later ones, so ours computes the tokens of images again.
            table, lens, starts = (
                one[mutual.first :] for one in (batch.page_table, batch.seq_lens, batch.query_starts)
            )
            attend_chunks(
                q, k_cache, v_cache, table, lens, starts, layer.scale, layer.window, layer.scores, out,
                layer.value_scale, mutual.ends,
            )  # fmt: skip
        decodes = rows_with_tokens(batch, len(q))
        if decodes:
            tokens = decodes * queries
            self._decode(
                q[:tokens], k_cache, v_cache, batch.page_table[:decodes], batch.seq_lens[:decodes], layer.scale,
                layer.window, out=out[:tokens], value_scale=layer.value_scale, scores=layer.scores, queries=queries,
            )  # fmt: skip
        return out


def rows_with_tokens(batch: AttentionBatch, tokens: int) -> int:
    """Return how many decodes a step of so many tokens has room for. Any later ones are unused and have no token."""
    return min(batch.num_decodes, tokens // batch.decode_queries)


class LatentLayer:
    """A layer whose cache holds one latent per token, which all heads attend to."""

    def __init__(self, backend: TritonAttention, layer: AttentionLayer) -> None:
        self._decode = backend.decode_latents
        self._layer = layer

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, /) -> Tensor:
        layer, rank, queries = self._layer, self._layer.latent_rank, batch.decode_queries
        if not batch.num_chunks:
            return self._decode(
                q, k_cache, rank, batch.page_table, batch.seq_lens, layer.scale, value_scale=layer.value_scale,
                queries=queries,
            )  # fmt: skip
        # Zeros, because some tokens of a captured step belong to no sequence.
        out = q.new_zeros(len(q), q.shape[1], rank)
        chunks = batch.chunks()
        attend_chunks(
            q, k_cache, v_cache[..., :rank], chunks.page_table, chunks.seq_lens, chunks.query_starts, layer.scale,
            out=out, value_scale=layer.value_scale,
        )  # fmt: skip
        decodes = rows_with_tokens(batch, len(q))
        tokens = decodes * queries
        self._decode(
            q[:tokens], k_cache, rank, batch.page_table[:decodes], batch.seq_lens[:decodes], layer.scale,
            out[:tokens], value_scale=layer.value_scale, queries=queries,
        )  # fmt: skip
        return out


class TritonPrefill(PrefillKernel):
    """Prefill with our Triton kernel, which reads keys and values in their pages. It supports every layer."""

    name = "Triton"
    why = ""
    capturable = True

    def bind(self, layer: AttentionLayer) -> Attend:
        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: AttentionBatch, /) -> Tensor:
            table, lens, starts = chunks.page_table, chunks.seq_lens, chunks.query_starts
            return attend_chunks(
                q, k_cache, v_cache, table, lens, starts, layer.scale, layer.window, layer.scores,
                value_scale=layer.value_scale,
            )  # fmt: skip

        return attend
