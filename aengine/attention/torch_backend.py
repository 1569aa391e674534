"""The backend of CPUs and the reference for others: torch's SDPA over gathered pages.

Decodes are batched. The query heads of one KV head become the "query length" of one SDPA call, so that K and V are
never repeated. Prefill chunks run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.attention.base import Attend, AttentionBatch, AttentionLayer, attend_whole
from aengine.kernels.kv_scales import FP8, as_bytes

# Decodes are padded to the longest context of their group. On a CPU, padding costs more than another call. So a group
# spans few context lengths.
_GROUP_STEP = 64  # tokens
# Chunks that need a mask run in blocks of this many queries, which bounds the mask.
_QUERY_BLOCK = 512


@dataclass(slots=True)
class _DecodeGroup:
    """Decodes of similar context length, padded to the longest."""

    tokens: Tensor | None  # [n * queries] int64: the sequences' tokens; None: the first tokens of the step
    pages: Tensor  # [n * pages] int64: the pages of each sequence, padded to the longest
    mask: Tensor  # [n, 1, queries, length]: 0 where visible, -inf elsewhere
    stale: Tensor  # int64: indices of gathered tokens after the end of a context; earlier sequences left them
    # [2, n * pages, page_size, kv_heads, dim]: memory into which all layers of a shape gather. FP8 is kept as bytes.
    _scratch: dict[torch.Size, Tensor] = field(default_factory=dict)

    def scratch(self, cache: Tensor) -> Tensor:
        """Return memory for the gathered K and V of layers with this cache's shape."""
        shape = cache.shape[1:]
        if shape not in self._scratch:
            self._scratch[shape] = cache.new_empty(2, len(self.pages), *shape)
        return self._scratch[shape]


@dataclass(slots=True)
class _QueryBlock:
    """Consecutive queries of a chunk. They see `context` tokens under `mask`, or causally if there is no mask."""

    queries: slice  # of the step's tokens
    context: int
    mask: Tensor | None  # [queries, context]


@dataclass(slots=True)
class _Chunk:
    pages: Tensor  # [pages] int64
    blocks: list[_QueryBlock]


@dataclass(slots=True)
class _Plan:
    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchAttention:
    """`AttentionBackend` in plain torch. Planning a step reads lengths on the host, so no CUDA graph can hold it."""

    name = "torch"

    def bind(self, layer: AttentionLayer) -> Attend:
        return partial(_attend, layer)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return attend_whole(q, k, v, scale)


def _attend(layer: AttentionLayer, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, /) -> Tensor:
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)  # torch has no copies by index for FP8
    plan = batch.plan(_Plan, lambda: _plan(q, k_cache, batch, layer.window), layer.window)
    if not plan.chunks and plan.decodes[0].tokens is None:
        out = _decode(layer, q, k_cache, v_cache, plan.decodes[0])
    else:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in plan.decodes:
            if group.tokens is None:
                n = group.mask.shape[0] * group.mask.shape[2]
                out[:n] = _decode(layer, q[:n], k_cache, v_cache, group)
            else:
                chosen = q.index_select(0, group.tokens)
                out.index_copy_(0, group.tokens, _decode(layer, chosen, k_cache, v_cache, group))
        for chunk in plan.chunks:
            k, v = (_floats(cache.index_select(0, chunk.pages), q.dtype).flatten(0, 1) for cache in (k_cache, v_cache))
            for block in chunk.blocks:
                out[block.queries] = _prefill(layer, q[block.queries], k[: block.context], v[: block.context], block)
    if layer.value_scale != 1.0:
        out.mul_(layer.value_scale)
    return out[..., : layer.latent_rank] if layer.latent_rank else out


def _decode(layer: AttentionLayer, q: Tensor, k_cache: Tensor, v_cache: Tensor, group: _DecodeGroup) -> Tensor:
    """Return the attention of decodes, [n * queries, heads, dim]. q: [n * queries, heads, dim]."""
    scale, scores, mask = layer.scale, layer.scores, group.mask
    tokens, heads, dim = q.shape
    n, queries = mask.shape[0], mask.shape[2]
    kv_heads, scratch = k_cache.shape[2], group.scratch(k_cache)
    k = _floats(torch.index_select(k_cache, 0, group.pages, out=scratch[0]), q.dtype).view(-1, kv_heads, dim)
    v = _floats(torch.index_select(v_cache, 0, group.pages, out=scratch[1]), q.dtype).view(-1, kv_heads, dim)
    k.index_fill_(0, group.stale, 0)
    v.index_fill_(0, group.stale, 0)
    if queries > 1:  # the heads of all queries follow each other, and each has its query's mask
        q = q.reshape(n, queries, kv_heads, -1, dim).transpose(1, 2).flatten(2, 3)
        mask = mask.repeat_interleave(heads // kv_heads, dim=2)
    else:
        q = q.view(n, kv_heads, heads // kv_heads, dim)
    k, v = (kept.view(n, -1, kv_heads, dim).transpose(1, 2) for kept in (k, v))
    if scores.plain:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1, 1).repeat(1, queries, 1)
        out = _attend_by_scores(q, k, v, mask, scale, scores.softcap, sinks)
    if queries == 1:
        return out.reshape(n, heads, dim)
    return out.view(n, kv_heads, queries, -1, dim).transpose(1, 2).reshape(tokens, heads, dim)


def _attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention with a softcap or sinks. Returns [..., queries, dim].

    q: [..., queries, dim]. k, v: [..., keys, dim]. mask: not zero where a key is hidden. sinks: [..., 1].
    """
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill_(mask != 0, -1e30)  # finite, so that a query without visible keys gives no NaN
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    with_sinks = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return with_sinks.softmax(-1)[..., :-1].to(v.dtype) @ v


def _floats(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Return FP8 codes as numbers of `dtype`, and other values as they are."""
    return kept.view(FP8).to(dtype) if kept.dtype == torch.uint8 else kept


def _prefill(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, block: _QueryBlock) -> Tensor:
    """Return the attention of a block of queries, [queries, heads, dim].

    q: [queries, heads, dim]. k, v: [context, kv_heads, dim].
    """
    scale, scores = layer.scale, layer.scores
    queries, heads, dim = q.shape
    context, kv_heads, _ = k.shape
    # The query heads of a KV head are the batch. They read its keys through a stride of 0. Heads must not have this
    # stride: if one query is left for the last block of torch's memory-efficient kernel for CUDA, the kernel would use
    # the first query's mask for it.
    shared = (heads // kv_heads, kv_heads, context, dim)
    q = q.view(queries, kv_heads, -1, dim).permute(2, 1, 0, 3)
    k, v = (kept.transpose(0, 1).expand(shared) for kept in (k, v))
    if scores.plain:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=block.mask, is_causal=block.mask is None, scale=scale
        )  # [group, kv_heads, queries, dim]
    else:
        mask = block.mask
        if mask is None:
            mask = torch.ones(queries, context, dtype=torch.bool, device=q.device).triu_(1)
        sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1).T[..., None, None]
        out = _attend_by_scores(q, k, v, mask, scale, scores.softcap, sinks)
    return out.permute(2, 1, 0, 3).reshape(queries, heads, dim)


def _plan(q: Tensor, k_cache: Tensor, batch: AttentionBatch, window: int | None) -> _Plan:
    """Make the plan that all layers with this window share in this step."""
    if q.device.type == "cpu":  # the host's lengths may be upper bounds
        batch = replace(batch, context_lens=batch.seq_lens.tolist())
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(batch.context_lens[: batch.num_decodes]):
        # Lengths are rounded up to multiples of 64 tokens. Long contexts have eight lengths for each doubling.
        width = max(_GROUP_STEP, 1 << max(0, length.bit_length() - 4))
        groups.setdefault(-(-length // width) * width, []).append(row)
    decodes = [_plan_decodes(rows, len(groups) == 1, q, k_cache, batch, window) for rows in groups.values()]
    chunks = []
    start = batch.decode_tokens
    for row in range(batch.num_decodes, len(batch.query_lens)):
        if batch.query_lens[row]:
            chunks.append(_plan_chunk(row, start, q, k_cache, batch, window))
        start += batch.query_lens[row]
    return _Plan(decodes, chunks)


def _plan_decodes(
    members: list[int], alone: bool, q: Tensor, k_cache: Tensor, batch: AttentionBatch, window: int | None
) -> _DecodeGroup:
    device, page_size = q.device, k_cache.shape[1]
    queries = batch.decode_queries
    n, longest = len(members), max(1, *(batch.context_lens[row] for row in members))
    num_pages = -(-longest // page_size)
    if alone:
        tokens, table, lens = None, batch.page_table[:n], batch.seq_lens[:n]
    else:
        rows = torch.tensor(members, device=device)
        tokens = (rows.unsqueeze(1) * queries + torch.arange(queries, device=device)).flatten()
        table, lens = batch.page_table.index_select(0, rows), batch.seq_lens.index_select(0, rows)
    lens = lens.unsqueeze(1)  # [n, 1]
    used_pages = (lens + page_size - 1) // page_size
    # After its last page, a row reads its first page again, so that it reads no page of another row.
    page_of = torch.arange(num_pages, device=device)
    pages = torch.where(page_of < used_pages, table[:, :num_pages], table[:, :1]).long().flatten()
    position = torch.arange(num_pages * page_size, device=device)
    gathered = torch.where(position < used_pages * page_size, position, position % page_size)
    stale = (gathered >= lens).flatten().nonzero().flatten()
    after = torch.arange(queries - 1, -1, -1, device=device) if batch.causal_decodes else lens.new_zeros(queries)
    ends = (lens - after).unsqueeze(2)  # [n, queries, 1]
    hidden = position >= ends
    if window is not None:
        hidden = hidden | (position < ends - window)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=device).masked_fill_(hidden, float("-inf"))
    return _DecodeGroup(tokens, pages, mask[:, None], stale)


def _plan_chunk(row: int, start: int, q: Tensor, k_cache: Tensor, batch: AttentionBatch, window: int | None) -> _Chunk:
    queries, context = batch.query_lens[row], batch.context_lens[row]
    pages = batch.page_table[row, : -(-context // k_cache.shape[1])].long()
    ends = _ends(batch, slice(start, start + queries), window)
    if queries == context and (window is None or context <= window) and ends is None:
        return _Chunk(pages, [_QueryBlock(slice(start, start + queries), context, None)])
    blocks = []
    for first in range(0, queries, _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, queries)
        end = context - queries + last
        at = torch.arange(end - (last - first), end, device=q.device).unsqueeze(1)  # positions of the queries
        seen, visible = at, end
        if ends is not None:
            seen = torch.maximum(at, ends[first:last].clamp(max=context).unsqueeze(1) - 1)
            visible = int(seen.max()) + 1
        key = torch.arange(visible, device=q.device)
        hidden = key > seen
        if window is not None:
            hidden |= key <= at - window
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        blocks.append(_QueryBlock(slice(start + first, start + last), visible, mask))
    return _Chunk(pages, blocks)


def _ends(batch: AttentionBatch, tokens: slice, window: int | None) -> Tensor | None:
    """Return `MutualTokens.ends` of a chunk's tokens. None: they attend causally."""
    if batch.mutual is None or not batch.mutual.are_in(window):
        return None
    ends = batch.mutual.ends[tokens]
    return ends if bool(ends.any()) else None
