"""If the keys of all prefill chunks do not fit into memory, attention runs in groups with their own queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.attention.chunk_groups import attend_in_groups, attend_without_decodes

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
def test_every_query_attends_once_to_its_own_keys(most: int, groups: list[list[int]] | None) -> None:
    q, chunks = torch.arange(float(sum(QUERIES))).view(-1, 1, 1), batch()
    seen = []

    def attend(own: Tensor, group: AttentionBatch) -> Tensor:
        seen.append(group.context_lens)
        assert len(own) == sum(group.query_lens) == group.query_starts[-1]
        return own + 100 * group.seq_lens.repeat_interleave(group.query_starts.diff()).view(-1, 1, 1)

    out = attend_in_groups(q, chunks, CONTEXTS, most, None, attend)
    assert seen == (groups or [[context] for context in CONTEXTS])
    keys = torch.tensor(CONTEXTS).repeat_interleave(torch.tensor(QUERIES))
    assert torch.equal(out.flatten(), q.flatten() + 100 * keys)


def test_decodes_before_the_chunks_are_left_alone() -> None:
    q, chunks = torch.arange(13.0).view(-1, 1, 1), batch()
    chunks.query_starts += 3

    def attend(own: Tensor, group: AttentionBatch) -> Tensor:
        assert group.query_starts.diff().tolist() == group.query_lens
        assert group.query_starts[0] == 0
        return own + 100 * group.seq_lens.repeat_interleave(group.query_starts.diff()).view(-1, 1, 1)

    out = attend_in_groups(q, chunks, CONTEXTS, 1, None, attend)
    keys = torch.tensor(CONTEXTS).repeat_interleave(torch.tensor(QUERIES))
    assert torch.equal(out[3:].flatten(), q[3:].flatten() + 100 * keys)


@pytest.mark.parametrize("decodes", [0, 3])
def test_a_kernel_can_get_the_queries_of_chunks_alone(decodes: int) -> None:
    q, chunks = torch.arange(10.0 + decodes).view(-1, 1, 1), batch()
    chunks.query_starts += decodes

    def attend(own: Tensor, group: AttentionBatch) -> Tensor:
        assert group.query_starts.tolist() == [0, 2, 5, 6, len(own)]
        assert group.query_lens == QUERIES
        return -own

    assert torch.equal(attend_without_decodes(q, chunks, attend)[decodes:], -q[decodes:])


def test_layers_with_and_without_a_window_have_groups_of_their_own() -> None:
    q, chunks, seen = torch.zeros(10, 1, 1), batch(), []

    def attend(own: Tensor, group: AttentionBatch) -> Tensor:
        seen.append(len(group.query_lens))
        return own

    for window, sizes in ((None, CONTEXTS), (8, chunks.seen_lens(8)), (None, CONTEXTS)):
        attend_in_groups(q, chunks, sizes, 30, window, attend)
    assert seen == [1, 1, 1, 1, 3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("window", [None, 1, 3, 25, 200])
def test_what_a_window_leaves_of_each_context(window: int | None) -> None:
    chunks = batch()
    first = [context - queries - (window or context) + 1 for context, queries in zip(CONTEXTS, QUERIES, strict=True)]
    unseen = [max(0, position) for position in first]
    assert chunks.unseen(window).tolist() == unseen
    assert chunks.seen_lens(window) == [context - hidden for context, hidden in zip(CONTEXTS, unseen, strict=True)]
    in_pages = [context - hidden // 4 * 4 for context, hidden in zip(CONTEXTS, unseen, strict=True)]
    assert chunks.seen_lens(window, 4) == in_pages


def test_one_group_gets_all_queries_whatever_the_lengths_say() -> None:
    """A captured step only knows upper bounds of lengths."""
    chunks = batch()
    chunks.query_lens = [1, 1, 1, 1]
    q = torch.ones(10, 1, 1)
    assert torch.equal(attend_in_groups(q, chunks, CONTEXTS, 1000, None, lambda own, _: 2 * own), 2 * q)
