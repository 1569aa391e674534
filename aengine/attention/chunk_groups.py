"""The prefill chunks of a step in groups whose keys have room together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch

MOST_GATHERED = 65536  # keys that are copied out of their pages at a time, unless one chunk has more


class ChunkGroups(list[AttentionBatch]):
    """Groups of chunks whose keys are gathered together. The query starts of each begin at 0."""


def attend_in_groups(
    q: Tensor,
    chunks: AttentionBatch,
    sizes: Sequence[int],
    most: int,
    window: int | None,
    attend: Callable[[Tensor, AttentionBatch], Tensor],
) -> Tensor:
    """Call `attend(q, group)` for each group of chunks with the group's own queries.

    The chunks are those of layers with this window, in groups of at most `most` keys or of one chunk.

    Args:
        q: [tokens, heads, dim]; the chunks' tokens are its last ones, after those of decodes.
        sizes: The keys of each chunk, padding included. Empty for a captured step, which is one group.

    Returns [tokens, heads, dim]. The values of tokens before the first chunk mean nothing.
    """
    if sum(sizes) <= most:
        return attend(q, chunks)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    end = len(q) - sum(chunks.query_lens)
    for group in chunks.plan(ChunkGroups, lambda: _make_groups(chunks, sizes, most), window):
        start, end = end, end + sum(group.query_lens)
        out[start:end] = attend(q[start:end], group)
    return out


def attend_apart(q: Tensor, chunks: AttentionBatch, attend: Callable[[Tensor, AttentionBatch], Tensor]) -> Tensor:
    """Call `attend` with the chunks' own queries, for kernels that take no others. Arguments as `attend_in_groups`.

    Those of flash-attn 2 read one query of each sequence as a matrix of all sequences.
    """
    first = len(q) - sum(chunks.query_lens)
    if not first:
        return attend(q, chunks)
    own = chunks.plan(AttentionBatch, lambda: chunks.part(0, len(chunks.query_lens)))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    out[first:] = attend(q[first:], own)
    return out


def _make_groups(chunks: AttentionBatch, sizes: Sequence[int], most: int) -> ChunkGroups:
    groups = ChunkGroups()
    first = 0
    while first < len(chunks.query_lens):
        last, keys = first + 1, sizes[first]
        while last < len(chunks.query_lens) and keys + sizes[last] <= most:
            keys += sizes[last]
            last += 1
        groups.append(chunks.part(first, last))
        first = last
    return groups
