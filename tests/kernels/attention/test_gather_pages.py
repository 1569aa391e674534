from __future__ import annotations

import math

import pytest
import torch

gather = pytest.importorskip("aengine.kernels.attention.gather_pages")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("page", "heads", "dim", "lens"),
    [
        pytest.param(4, 1, 16, [3, 0, 8, 0], id="tiny"),
        (16, 8, 128, [4096, 1, 0, 700, 17]),
        (16, 3, 64, [33] * 70),
        (48, 2, 128, [100, 47]),
    ],
)
def test_sequences_lie_one_after_the_other_with_zeros_between(
    page: int, heads: int, dim: int, lens: list[int], device: torch.device
) -> None:
    counts = [-(-length // page) for length in lens]
    pages = (torch.randperm(sum(counts)) + 1).int().tolist()
    caches = torch.randn(2, sum(counts) + 1, page, heads, dim, device=device)
    table = torch.zeros(len(lens), max(counts) + 2, dtype=torch.int32, device=device)
    expected = [[], []]
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        own = [pages.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(own, dtype=torch.int32)
        if length % page:
            caches[:, own[-1], length % page :] = math.nan  # of an earlier owner
        room = gather.gathered_tokens(length, page)
        assert room >= length + gather.GAP or length == 0
        for which in range(2):
            whole = torch.zeros(room, heads, dim, device=device)
            whole[:length] = caches[which, own].flatten(0, 1)[:length]
            expected[which].append(whole)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    total = sum(gather.gathered_tokens(length, page) for length in lens)
    out = torch.full((2, total + 3 * page, heads, dim), 7.0, device=device)

    plan = gather.plan_gather(seq_lens, page)
    gather.gather_pages(*caches, table, seq_lens, plan, *out)

    assert plan.starts[-1] == total
    for which in range(2):
        assert torch.equal(out[which, :total], torch.cat(expected[which]))
        assert (out[which, total:] == 7.0).all()
