"""The prefill chunks of a step in groups whose keys have room together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch

MOST_GATHERED = 65536  # keys that are copied out of their pages at a time, unless one chunk has more


class ChunkGroups(list[tuple[AttentionBatch, int]]):
    """Chunks whose keys are gathered together, and the first query token of each group."""


def attend_in_groups(
    q: Tensor,
    chunks: AttentionBatch,
    sizes: Sequence[int],
    most: int,
    attend: Callable[[Tensor, AttentionBatch], Tensor],
) -> Tensor:
    """`attend(q, group)` of each group's own queries, one group after the other: [tokens, heads, dim].

    q [tokens, heads, dim] of all chunks; sizes, most: see `chunk_groups`.
    """
    outs = [
        # Of a captured step the lengths are bounds.
        attend(q if group is chunks else q[first : first + sum(group.query_lens)], group)
        for group, first in chunk_groups(chunks, sizes, most)
    ]
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def chunk_groups(chunks: AttentionBatch, sizes: Sequence[int], most: int) -> ChunkGroups:
    """The chunks in groups of at most `most` keys, or of one chunk. sizes: the keys of each, with what they pad."""
    if sum(sizes) <= most:
        return ChunkGroups([(chunks, 0)])  # not kept: the chunks would refer to themselves
    return chunks.plan(ChunkGroups, lambda: _make_groups(chunks, sizes, most))


def _make_groups(chunks: AttentionBatch, sizes: Sequence[int], most: int) -> ChunkGroups:
    groups = ChunkGroups()
    first = token = 0
    while first < len(chunks.query_lens):
        last, keys = first + 1, sizes[first]
        while last < len(chunks.query_lens) and keys + sizes[last] <= most:
            keys += sizes[last]
            last += 1
        part = slice(first, last)
        group = AttentionBatch(
            slots=chunks.slots,
            page_table=chunks.page_table[part],
            seq_lens=chunks.seq_lens[part],
            query_starts=chunks.query_starts[first : last + 1] - token,
            num_decodes=0,
            query_lens=chunks.query_lens[part],
            context_lens=chunks.context_lens[part],
        )
        groups.append((group, token))
        token += sum(group.query_lens)
        first = last
    return groups
