"""Prefill attention through our own kernel: over latents, for heads that no flash kernel takes, and for scores that are
capped or have sinks where the flash kernel knows of neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.kernels.attention.chunk_attention import attend_chunks
from aengine.kernels.attention.heads import PLAIN, Scores


class TritonChunks:
    """`PrefillAttention` on the pages as they are."""

    name = "Triton"
    capturable = True

    def __init__(self, why: str) -> None:
        self.why = why

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
        table, lens, starts = chunks.page_table, chunks.seq_lens, chunks.query_starts
        return attend_chunks(q, k_cache, v_cache, table, lens, starts, scale, window, scores, value_scale=value_scale)
