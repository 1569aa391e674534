"""Prefill chunks whose keys have no room together are attended to in groups, each with its own queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.attention.chunk_groups import attend_in_groups

QUERIES, CONTEXTS = [2, 3, 1, 4], [20, 30, 90, 4]


def batch() -> AttentionBatch:
    return AttentionBatch(
        slots=torch.arange(sum(QUERIES)),
        page_table=torch.arange(4).view(4, 1).int(),
        seq_lens=torch.tensor(CONTEXTS, dtype=torch.int32),
        query_starts=torch.tensor([0, 2, 5, 6, 10], dtype=torch.int32),
        num_decodes=0,
        query_lens=QUERIES,
        context_lens=CONTEXTS,
    )


@pytest.mark.parametrize(
    ("most", "groups"), [(144, [CONTEXTS]), (100, [[20, 30], [90, 4]]), (50, [[20, 30], [90], [4]]), (1, None)]
)
def test_every_query_is_attended_to_once_beside_its_own_keys(most: int, groups: list[list[int]] | None) -> None:
    q, chunks = torch.arange(float(sum(QUERIES))).view(-1, 1, 1), batch()
    seen = []

    def attend(own: Tensor, group: AttentionBatch) -> Tensor:
        seen.append(group.context_lens)
        assert len(own) == sum(group.query_lens) == group.query_starts[-1]
        return own + 100 * group.seq_lens.repeat_interleave(group.query_starts.diff()).view(-1, 1, 1)

    out = attend_in_groups(q, chunks, CONTEXTS, most, attend)
    assert seen == (groups or [[context] for context in CONTEXTS])
    keys = torch.tensor(CONTEXTS).repeat_interleave(torch.tensor(QUERIES))
    assert torch.equal(out.flatten(), q.flatten() + 100 * keys)


def test_of_one_group_all_queries_are_given_whatever_the_lengths_say() -> None:
    """A captured step knows bounds of them alone."""
    chunks = batch()
    chunks.query_lens = [1, 1, 1, 1]
    q = torch.ones(10, 1, 1)
    assert torch.equal(attend_in_groups(q, chunks, CONTEXTS, 1000, lambda own, _: 2 * own), 2 * q)
