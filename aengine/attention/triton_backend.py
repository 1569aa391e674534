"""Attention on CUDA devices: our paged kernel for decodes, flash-attn for prefill chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.attention.flash_backend import choose_prefill
from aengine.kernels.decode_attention import PagedDecode
from aengine.kernels.prefix_attention import attend_shared

_CHUNKS = -2  # where a batch keeps its own view of its chunks


class TritonAttention:
    """`AttentionBackend`; a step of decodes alone reads nothing on the host, so a CUDA graph can hold it.

    capturable: whether one with prefill chunks can be held as well.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._decode = PagedDecode()
        self._prefill = choose_prefill(device, dtype)
        self.name = f"Triton (decode), {self._prefill.name} (prefill)"
        self.why = self._prefill.why
        self.capturable = self._prefill.capturable

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """As `PrefillAttention.fits`."""
        return self._prefill.fits(tokens, contexts, page_size)

    def forward(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, window: int | None
    ) -> Tensor:
        decodes = batch.num_decodes
        if batch.chunks is not None:
            out = self._prefill(q, k_cache, v_cache, batch.chunks, scale, window)
            self._decode(
                q[:decodes], k_cache, v_cache, batch.page_table, batch.seq_lens, scale, window, out=out[:decodes]
            )
            return out
        if decodes == len(batch.query_lens):
            shared = None
            if batch.shared is not None and window is None:
                shared = attend_shared(q, k_cache, v_cache, batch.page_table, batch.shared, scale)
            return self._decode(q, k_cache, v_cache, batch.page_table, batch.seq_lens, scale, window, shared)
        chunks = _chunks(batch)
        if not decodes:
            return self._prefill(q, k_cache, v_cache, chunks, scale, window)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._decode(
            q[:decodes],
            k_cache,
            v_cache,
            batch.page_table[:decodes],
            batch.seq_lens[:decodes],
            scale,
            window,
            out=out[:decodes],
        )
        out[decodes:] = self._prefill(q[decodes:], k_cache, v_cache, chunks, scale, window)
        return out


def _chunks(batch: AttentionBatch) -> AttentionBatch:
    """The prefill chunks alone, made once per step."""
    first = batch.num_decodes
    if not first:
        return batch
    chunks = batch.plans.get(_CHUNKS)
    if not isinstance(chunks, AttentionBatch):
        chunks = AttentionBatch(
            slots=batch.slots[first:],
            page_table=batch.page_table[first:],
            seq_lens=batch.seq_lens[first:],
            query_starts=batch.query_starts[first:] - first,  # a decode has one token
            num_decodes=0,
            query_lens=batch.query_lens[first:],
            context_lens=batch.context_lens[first:],
        )
        batch.plans[_CHUNKS] = chunks
    return chunks
