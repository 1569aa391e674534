"""Calls of all ranks, each from its thread, without the devices that they are for."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch

pytest.importorskip("triton")  # comes with the ranks' collectives

from aengine.runtime.cuda.ranks import DeviceRanks, keep_pinned_memory


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> DeviceRanks:
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return DeviceRanks(["first", "second"])  # type: ignore[list-item]


def test_results_come_by_rank(ranks: DeviceRanks) -> None:
    assert ranks([lambda: "a", lambda: "b"]) == ["a", "b"]
    assert ranks([lambda: "a", lambda: "b"], short=True) == ["a", "b"]
    ranks.close()


class Memory:
    """What a step has allocated."""


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_error_that_is_handled_keeps_no_memory_of_the_step(ranks: DeviceRanks, short: bool, failing: int) -> None:
    kept: list[weakref.ref[Memory]] = []

    def step(rank: int) -> None:
        memory = Memory()
        kept.append(weakref.ref(memory))
        if rank == failing:
            raise MemoryError(f"rank {rank}")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(MemoryError, match=f"rank {failing}") as error:
            ranks([partial(step, 0), partial(step, 1)], short)
        del error
        assert [memory() for memory in kept] == [None] * len(kept)
    finally:
        gc.enable()
        ranks.close()


@pytest.mark.parametrize("ranks", [2, 8])
def test_uploads_of_every_size_find_memory_for_each_rank(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[int] = Counter()

    def empty(size: int, dtype: torch.dtype, pin_memory: bool) -> None:
        assert pin_memory
        taken[size * dtype.itemsize] += 1

    monkeypatch.setattr(torch, "empty", empty)
    keep_pinned_memory(ranks)
    pages = 3 * 8  # bytes that name one: its row, its place there, itself
    for rows in (1, 4, 64, 256, 1024):
        for nbytes in (8 * rows, pages * rows):
            assert taken[1 << (nbytes - 1).bit_length()] >= 6 * ranks
    assert min(taken) == 4  # an int32
    assert sum(size * count for size, count in taken.items()) < ranks * 24 * 2**20
