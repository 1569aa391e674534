"""Calls a kernel once for each group of prefill chunks, so that the gathered keys of a group fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch

MOST_GATHERED = 65536  # the most keys of a group, unless one chunk has more


class ChunkGroups(list[AttentionBatch]):
    """Groups of chunks. The query_starts of each group begin at 0."""


def attend_in_groups(
    q: Tensor,
    chunks: AttentionBatch,
    sizes: Sequence[int],
    most: int,
    window: int | None,
    attend: Callable[[Tensor, AttentionBatch], Tensor],
) -> Tensor:
    """Call `attend(q, group)` for each group of chunks, with the group's queries.

    Args:
        q: [tokens, heads, dim]. The chunks' tokens come last, after the tokens of decodes.
        sizes: The number of keys of each chunk, with padding. Empty for a captured step, which is one group.
        most: The largest number of keys of a group. A chunk with more keys is a group of its own.
        window: The layers' window. None: they have none.

    Returns [tokens, heads, dim]. The values of tokens before the first chunk are undefined.
    """
    if sum(sizes) <= most:
        return attend(q, chunks)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    end = len(q) - sum(chunks.query_lens)
    for group in chunks.plan(ChunkGroups, lambda: _make_groups(chunks, sizes, most), window):
        start, end = end, end + sum(group.query_lens)
        out[start:end] = attend(q[start:end], group)
    return out


def attend_without_decodes(
    q: Tensor, chunks: AttentionBatch, attend: Callable[[Tensor, AttentionBatch], Tensor]
) -> Tensor:
    """Call `attend` with only the queries of chunks, for kernels that do not allow other queries before them.

    flash-attn-2 does not: if each sequence has one query, it reads all of q as one matrix.
    """
    first = len(q) - sum(chunks.query_lens)
    if not first:
        return attend(q, chunks)
    alone = chunks.plan(AttentionBatch, lambda: chunks.chunk_range(0, len(chunks.query_lens)))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    out[first:] = attend(q[first:], alone)
    return out


def _make_groups(chunks: AttentionBatch, sizes: Sequence[int], most: int) -> ChunkGroups:
    groups = ChunkGroups()
    first = 0
    while first < len(chunks.query_lens):
        last, keys = first + 1, sizes[first]
        while last < len(chunks.query_lens) and keys + sizes[last] <= most:
            keys += sizes[last]
            last += 1
        groups.append(chunks.chunk_range(first, last))
        first = last
    return groups
