from __future__ import annotations

import math

import pytest
import torch

from aengine.kernels.kv_scales import encode

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
def test_sequences_are_copied_one_after_the_other_with_zeros_between(
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
            caches[:, own[-1], length % page :] = math.nan  # stale contents
        room = gather.gathered_tokens(length, page)
        assert room >= length + gather.GAP or length == 0
        for which in range(2):
            whole = torch.zeros(room, heads, dim, device=device)
            whole[:length] = caches[which, own].flatten(0, 1)[:length]
            expected[which].append(whole)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    total = sum(gather.gathered_tokens(length, page) for length in lens)
    out = torch.full((2, total + 3 * page, heads, dim), 7.0, device=device)

    plan = gather.plan_gather(seq_lens, torch.zeros_like(seq_lens), page)
    gather.gather_pages(*caches, table, seq_lens, plan, *out)

    assert plan.starts[-1] == total
    assert torch.equal(plan.lens, seq_lens)
    for which in range(2):
        assert torch.equal(out[which, :total], torch.cat(expected[which]))
        assert (out[which, total:] == 7.0).all()


@pytest.mark.parametrize("page", [pytest.param(4, id="tiny"), 16])
def test_whole_pages_that_no_query_sees_are_not_copied(page: int, device: torch.device) -> None:
    lens, unseen = [4 * page - 1, 2 * page, 3], [2 * page + 1, page - 1, 0]
    skipped = [2, 0, 0]
    caches = torch.randn(2, 8, page, 2, 16, device=device)
    caches[:, :3] = math.nan  # skipped pages may belong to another sequence
    table = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]], dtype=torch.int32, device=device)
    kept = [length - page * count for length, count in zip(lens, skipped, strict=True)]
    rooms = [gather.gathered_tokens(length, page) for length in kept]
    out = torch.full((2, sum(rooms), 2, 16), 7.0, device=device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    plan = gather.plan_gather(seq_lens, torch.tensor(unseen, dtype=torch.int32, device=device), page)
    gather.gather_pages(*caches, table, seq_lens, plan, *out)

    assert plan.lens.tolist() == kept
    assert plan.starts.tolist() == [0, *torch.tensor(rooms).cumsum(0).tolist()]
    for i, (start, length, room) in enumerate(zip(plan.starts.tolist(), kept, rooms)):
        whole = caches[:, table[i].long()].flatten(1, 2)[:, skipped[i] * page : lens[i]]
        assert torch.equal(out[:, start : start + length], whole)
        assert not out[:, start + length : start + room].any()


@pytest.mark.parametrize("page", [pytest.param(4, id="tiny"), 16])
def test_codes_become_numbers_and_values_get_their_scale(page: int, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    lens = [3 * page - 1, 0, page]
    codes = encode(torch.randn(2, 6, page, 2, 16, device=device) * 20, 1.0)
    codes[:, 2, page - 1 :] = math.nan
    table = torch.tensor([[5, 1, 2], [0, 0, 0], [4, 0, 0]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    total = sum(gather.gathered_tokens(length, page) for length in lens)
    k, v = torch.full((2, total, 2, 16), 7.0, dtype=dtype, device=device)

    plan = gather.plan_gather(seq_lens, torch.zeros_like(seq_lens), page)
    gather.gather_pages(*codes, table, seq_lens, plan, k, v, value_scale=0.75)

    second = gather.gathered_tokens(lens[0], page)
    for out, kept, scale in ((k, codes[0], 1.0), (v, codes[1], 0.75)):
        expected = torch.zeros(total, 2, 16, device=device)
        expected[: lens[0]] = kept[[5, 1, 2]].float().flatten(0, 1)[: lens[0]] * scale
        expected[second : second + lens[2]] = kept[4].float() * scale
        assert torch.equal(out, expected.to(dtype))
