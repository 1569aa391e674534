"""Attention on CUDA devices: our paged kernel for decodes, flash-attn for prefill chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.attention.flash_backend import PrefillAttention
from aengine.kernels.attention.chunk_attention import attend_chunks
from aengine.kernels.attention.decode_attention import PagedDecode
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.attention.latent_decode import LatentDecode
from aengine.kernels.attention.prefix_attention import attend_shared


class TritonAttention:
    """`AttentionBackend`; a step of decodes alone reads nothing on the host, so a CUDA graph can hold it."""

    def __init__(self, prefill: Callable[[], PrefillAttention]) -> None:
        """prefill: gives the attention of prefill chunks once it is needed; its packages take seconds to import."""
        self._decode = PagedDecode()
        self._decode_latents = LatentDecode()
        self._get_prefill = prefill

    @cached_property
    def _prefill(self) -> PrefillAttention:
        return self._get_prefill()

    @property
    def name(self) -> str:
        return f"Triton (decode), {self._prefill.name} (prefill)"

    @property
    def why(self) -> str:
        """Why prefill runs as it does, for the start-up log."""
        return self._prefill.why

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a step with prefill chunks as well."""
        return self._prefill.capturable

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """As `PrefillAttention.fits`."""
        return self._prefill.fits(tokens, contexts, page_size)

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
        decodes = batch.num_decodes
        if not batch.num_chunks:
            shared = None
            if batch.shared is not None and window is None and scores.plain:
                shared = attend_shared(q, k_cache, v_cache, batch.page_table, batch.shared, scale)
            return self._decode(
                q, k_cache, v_cache, batch.page_table, batch.seq_lens, scale, window, shared,
                value_scale=value_scale, scores=scores,
            )  # fmt: skip
        out = self._prefill(q, k_cache, v_cache, batch.chunks(), scale, window, value_scale, scores)
        if decodes:
            self._decode(
                q[:decodes], k_cache, v_cache, batch.page_table[:decodes], batch.seq_lens[:decodes], scale, window,
                out=out[:decodes], value_scale=value_scale, scores=scores,
            )  # fmt: skip
        return out

    def over_latents(
        self, q: Tensor, cache: Tensor, rank: int, batch: AttentionBatch, scale: float, value_scale: float = 1.0
    ) -> Tensor:
        decodes = batch.num_decodes
        if not batch.num_chunks:
            return self._decode_latents(
                q, cache, rank, batch.page_table, batch.seq_lens, scale, value_scale=value_scale
            )
        # Zeros: of a captured step some tokens belong to nobody.
        out = q.new_zeros(len(q), q.shape[1], rank)
        chunks = batch.chunks()
        attend_chunks(
            q, cache, cache[..., :rank], chunks.page_table, chunks.seq_lens, chunks.query_starts, scale,
            out=out, value_scale=value_scale,
        )  # fmt: skip
        self._decode_latents(
            q[:decodes], cache, rank, batch.page_table[:decodes], batch.seq_lens[:decodes], scale, out[:decodes],
            value_scale=value_scale,
        )  # fmt: skip
        return out
