"""Prefill attention through our own kernel: over latents, and for heads that no flash kernel takes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.attention.chunk_attention import attend_chunks
from aengine.kernels.attention.scores import PLAIN, Scores


class TritonChunks:
    """`PrefillAttention` on the pages as they are, which reads nothing on the host.

    The torch reference, which does, stands in for it where there are windows, other scores or FP8 caches.
    """

    name = "Triton"
    capturable = True

    def __init__(self, why: str) -> None:
        self.why = why
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
        if window is not None or not scores.plain or k_cache.dtype != q.dtype:
            return self._reference.forward(q, k_cache, v_cache, chunks, scale, window, value_scale, scores)
        return attend_chunks(q, k_cache, v_cache, chunks.page_table, chunks.seq_lens, chunks.query_starts, scale)
