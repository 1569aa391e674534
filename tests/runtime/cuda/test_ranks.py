"""Calls of all ranks, each from its thread, without the devices that they are for."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch

pytest.importorskip("triton")  # comes with the ranks' collectives

from aengine.runtime.cuda.ranks import DeviceRanks


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
@pytest.mark.parametrize("short", [True, False])
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
