"""The counting sort and its tiles."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aengine.kernels.experts.routing import plan as plan_module
from aengine.kernels.experts.routing.plan import make_plan, most_tiles

pytestmark = pytest.mark.gpu


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "height"),
    [
        pytest.param(9, 2, 5, 4, id="tiny"),
        pytest.param(1, 3, 3, 16, id="tiny-one-token"),
        pytest.param(70, 2, 5, 16, id="tiny-many-pairs"),
        (300, 8, 128, 32),
        (16384, 8, 128, 128),
        (5000, 8, 512, 16),
    ],
)
@pytest.mark.parametrize("skew", [0, 1, 2])
def test_pairs_are_sorted_stably_and_cut_into_tiles_of_one_expert(
    tokens: int,
    top_k: int,
    experts: int,
    height: int,
    skew: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tokens == 70:  # pretend that these are many
        monkeypatch.setattr(plan_module, "AT_ONCE", (64,))
        monkeypatch.setattr(plan_module, "BLOCK", 32)
    ids = torch.randint(0, experts, (tokens, top_k), dtype=torch.int32, device=device)
    if skew == 1:
        ids[:] = experts - 1
    if skew == 2:
        ids[tokens // 2 :] = torch.tensor([-1, experts, experts + 7], dtype=torch.int32).repeat(top_k)[:top_k]
    flat = ids.flatten().long()
    known = ((flat >= 0) & (flat < experts)).nonzero().flatten()
    expected = known[flat[known].sort(stable=True).indices]
    plan = make_plan(ids, experts, height)
    assert torch.equal(plan.order[: len(expected)].long(), expected)
    assert torch.equal(plan.places[expected].long(), torch.arange(len(expected), device=device))
    counts = flat[known].bincount(minlength=experts)
    assert torch.equal(plan.ends.long(), counts.cumsum(0))
    tiles = [
        [expert, start, min(start + height, end)]
        for expert, (end, count) in enumerate(zip(plan.ends.tolist(), counts.tolist()))
        for start in range(end - count, end, height)
    ]
    assert plan.count.item() == len(tiles) <= plan.capacity
    assert plan.tiles[:, : len(tiles)].t().tolist() == tiles


def test_no_spread_has_more_tiles_than_there_is_room_for_tiny() -> None:
    for counts, height in (([1, 1, 1, 1], 4), ([5, 1, 1, 1], 4), ([9, 0, 0, 0], 4), ([3, 3, 3, 3], 2)):
        assert sum(-(-count // height) for count in counts) <= most_tiles(sum(counts), len(counts), height)


def test_more_pairs_than_it_counts_are_refused_tiny() -> None:
    with pytest.raises(ValueError, match="2097152 pairs of tokens and experts are more than 2097151"):
        make_plan(torch.zeros(2**18, 8, dtype=torch.int32), 4, 16)
