"""Prefill attention through our own kernel: over latents, and for heads that no flash kernel takes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.attention.chunk_attention import attend_chunks
from aengine.kernels.attention.scores import PLAIN, Scores


class TritonChunks:
    """`PrefillAttention` on the pages as they are; the torch reference stands in for it where these are FP8."""

    name = "Triton"

    def __init__(self, why: str, fp8: bool = False) -> None:
        """fp8: whether the cache is."""
        self.why = why
        self.capturable = not fp8
        self._reference = TorchAttention()

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """As `PrefillAttention.fits`."""
        return True

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        chunks: AttentionBatch,
        scale: float,
        window: int | None,
        value_scale: float = 1.0,
        scores: Scores = PLAIN,
    ) -> Tensor:
        """As `PrefillAttention`."""
        if k_cache.dtype != q.dtype:
            return self._reference.forward(q, k_cache, v_cache, chunks, scale, window, value_scale, scores)
        table, lens, starts = chunks.page_table, chunks.seq_lens, chunks.query_starts
        return attend_chunks(q, k_cache, v_cache, table, lens, starts, scale, window, scores)
