"""Ranks that are threads: sums in the order of the ranks, gathers, and ranks that give up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from aengine.kernels.collective.base import Collective
from aengine.kernels.collective.threads import Meeting, ThreadCollective
from aengine.kernels.torch_kernels import TorchKernels

T = TypeVar("T")


def together(count: int, call: Callable[[Collective], T]) -> list[T]:
    """Return each rank's result."""
    meeting = Meeting(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, [ThreadCollective(rank, count, meeting) for rank in range(count)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_sums_are_in_the_order_of_the_ranks_and_rounded_once(count: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(3, 8).to(dtype) for _ in range(count)]
    residual = torch.randn(3, 8).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    plain = together(count, lambda rank: rank.sum(parts[rank.index]))
    added = together(count, lambda rank: rank.sum(parts[rank.index], residual.clone()))
    for result in plain:
        torch.testing.assert_close(result, total.to(dtype), rtol=0, atol=0)
    for result in added:
        torch.testing.assert_close(result, (total + residual.to(wide)).to(dtype), rtol=0, atol=0)


def test_the_norm_of_a_sum_is_of_the_rounded_sum() -> None:
    parts, residual = torch.randn(2, 3, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    norm = TorchKernels().norm(torch.rand(8).bfloat16() + 0.5, 1e-6)
    results = together(2, lambda rank: rank.sum_and_norm(parts[rank.index].clone(), residual, norm))
    for x, normed in results:
        torch.testing.assert_close(x, (parts.float().sum(0) + residual.float()).bfloat16(), rtol=0, atol=0)
        torch.testing.assert_close(normed, norm(x), rtol=0, atol=0)


@pytest.mark.parametrize("width", [10, 12])
def test_columns_are_side_by_side_by_rank_and_cut_to_the_width(width: int) -> None:
    parts = torch.randn(4, 5, 3)
    results = together(4, lambda rank: rank.gather(parts[rank.index], width))
    for whole in results:
        assert whole.is_contiguous()
        torch.testing.assert_close(whole, torch.cat(list(parts), dim=1)[:, :width], rtol=0, atol=0)


def test_ranks_that_are_ahead_do_not_overwrite_parts_that_others_read() -> None:
    def many(rank: Collective) -> list[float]:
        return [float(rank.sum(torch.full((1, 1), float(turn + rank.index)))) for turn in range(200)]

    for results in together(4, many):
        assert results == [4.0 * turn + 6 for turn in range(200)]


def test_no_rank_waits_for_one_that_gave_up() -> None:
    meeting = Meeting(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ThreadCollective(0, 2, meeting).sum, torch.ones(1, 1))
        meeting.give_up()
        with pytest.raises(threading.BrokenBarrierError):
            waiting.result()
        with pytest.raises(threading.BrokenBarrierError):
            ThreadCollective(1, 2, meeting).sum(torch.ones(1, 1))
        meeting.renew()
        first = pool.submit(ThreadCollective(0, 2, meeting).sum, torch.ones(1, 1))
        assert ThreadCollective(1, 2, meeting).sum(torch.ones(1, 1)).item() == 2
        assert first.result().item() == 2
