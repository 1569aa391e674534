"""Attention batches written by hand, so that the first lessons need neither scheduler nor runtime."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.model.decoder import Decoder


def pool_for(decoder: Decoder, num_pages: int, page_size: int) -> KVPool:
    """Return a KV pool of the decoder's shape."""
    return KVPool(decoder.config.kv_shape(page_size, decoder.dtype), num_pages, decoder.device)


def feed(decoder: Decoder, kv: KVPool, pages: Sequence[int], start: int, token_ids: Sequence[int]) -> Tensor:
    """Send tokens at positions start, start + 1, ... of one sequence through the model.

    Returns the logits after the last token, [vocab]. `pages` hold the sequence's KV in order. The KV of all positions
    before `start` must be there already.
    """
    size = kv.page_size
    places = range(start, start + len(token_ids))
    batch = AttentionBatch(
        slots=torch.tensor([pages[place // size] * size + place % size for place in places]),
        page_table=torch.tensor([list(pages)], dtype=torch.int32),
        seq_lens=torch.tensor([places.stop], dtype=torch.int32),
        query_starts=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        num_decodes=0,
        query_lens=[len(token_ids)],
        context_lens=[places.stop],
    )
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor(token_ids), torch.tensor(list(places)), batch, kv)
        return decoder.logits(hidden[-1:])[0]
