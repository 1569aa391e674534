"""Ranks in threads meet. If one fails, the others stop waiting for it, and all can meet again."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aengine.kernels.collective.threads import Meeting, ThreadCollective
from aengine.runtime.ranks import ThreadedRanks

MEETINGS = 3


class Stumbled(Exception):
    """What a rank raises of itself."""


class Team:
    """Ranks whose step is some sums, and who may fail at any point of it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.meeting = Meeting(count)
        self.together = ThreadedRanks(self.meeting, count, torch_threads=1)
        self.collectives = [ThreadCollective(rank, count, self.meeting) for rank in range(count)]

    def step(self, failing: dict[int, int]) -> list[Tensor]:
        """failing: maps a rank to the meeting before which it raises. `MEETINGS` means after the last one."""
        return self.together([partial(self._step, rank, failing.get(rank)) for rank in range(self.count)])

    def _step(self, rank: int, failing: int | None) -> Tensor:
        total = torch.full((1, 1), float(rank + 1))
        for meeting in range(MEETINGS + 1):
            if meeting == failing:
                raise Stumbled(f"rank {rank} at {meeting}")
            if meeting < MEETINGS:
                total = self.collectives[rank].sum(total)
        return total


@pytest.fixture
def made() -> Iterator[Callable[[int], Team]]:
    teams: list[Team] = []

    def make(count: int) -> Team:
        teams.append(Team(count))
        return teams[-1]

    yield make
    for team in teams:
        team.together.close()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_all_ranks_have_the_same_sums_and_rows(count: int, made: Callable[[int], Team]) -> None:
    team = made(count)
    total = count * (count + 1) / 2 * count ** (MEETINGS - 1)
    assert [one.item() for one in team.step({})] == [total] * count
    calls = [partial(one.gather, torch.full((2, 3), float(one.index)), 3 * count - 2) for one in team.collectives]
    for rows in team.together(calls):
        assert rows.tolist() == [[float(column // 3) for column in range(3 * count - 2)]] * 2


def test_sums_are_rounded_once(made: Callable[[int], Team]) -> None:
    """In bfloat16 1 + 2 ** -8 is 1: the parts alone would be lost one by one."""
    team, part = made(4), torch.full((1, 1), 2.0**-8, dtype=torch.bfloat16)
    calls = [partial(one.sum, part.clone(), torch.ones(1, 1, dtype=torch.bfloat16)) for one in team.collectives]
    assert [one.item() for one in team.together(calls)] == [1 + 2.0**-6] * 4


@given(
    count=st.sampled_from([2, 3, 4]),
    steps=st.lists(st.dictionaries(st.integers(0, 3), st.integers(0, MEETINGS), max_size=3), min_size=1, max_size=8),
)
def test_a_step_that_fails_on_some_ranks_fails_with_their_error_and_the_next_one_works(
    count: int, steps: list[dict[int, int]]
) -> None:
    team = Team(count)
    try:
        for step in steps:
            failing = {rank: at for rank, at in step.items() if rank < count}
            if failing:
                with pytest.raises(Stumbled) as caught:
                    team.step(failing)
                assert str(caught.value) in {f"rank {rank} at {at}" for rank, at in failing.items()}
            else:
                assert len({one.item() for one in team.step({})}) == 1
        assert len(team.step({})) == count
    finally:
        team.together.close()


def test_threads_end_with_their_ranks(made: Callable[[int], Team]) -> None:
    before = set(threading.enumerate())
    team = made(4)
    team.step({})
    ranks = set(threading.enumerate()) - before
    assert len(ranks) == 4
    team.together.close()
    assert not any(rank.is_alive() for rank in ranks)


class Memory:
    """What a step has allocated."""


def test_an_error_that_is_handled_keeps_no_memory_of_the_step(made: Callable[[int], Team]) -> None:
    """Not even until the collector runs: the next step may need it."""
    team, kept = made(2), list[weakref.ref[Memory]]()

    def step(rank: int) -> None:
        memory = Memory()
        kept.append(weakref.ref(memory))
        if rank == 1:
            raise Stumbled(f"rank {rank}")
        team.meeting.exchange(rank, torch.zeros(1))

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Stumbled) as error:
            team.together([partial(step, 0), partial(step, 1)])
        del error
        end = time.monotonic() + 5
        while any(memory() for memory in kept) and time.monotonic() < end:
            time.sleep(0.001)  # until the threads have dropped their errors
        assert [memory() for memory in kept] == [None, None]
    finally:
        gc.enable()
