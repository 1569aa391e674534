"""The waiting queue by itself."""

from __future__ import annotations

import weakref

import pytest

from aengine.cache.radix import packed
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.queue import WaitingQueue
from aengine.scheduling.sequence import Sequence


class Counted(Sequence):
    """Counts lookups, and shows when it is no longer referenced."""

    lookups = 0

    def __hash__(self) -> int:
        Counted.lookups += 1
        return id(self)


def waiting(rank: float, ticket: int = 0, index: int = 0) -> Sequence:
    return Counted(
        prompt=packed([1]),
        params=SamplingParams(),
        seed=0,
        stop_ids=(),
        max_total=2,
        rank=(rank, ticket),
        index=index,
    )


def test_the_smallest_rank_comes_first_then_the_ticket_then_the_choice() -> None:
    queue = WaitingQueue()
    order = [waiting(1.0, 7, 0), waiting(1.0, 7, 1), waiting(1.0, 8), waiting(2.0, 3)]
    for sequence in (order[2], order[1], order[3], order[0]):
        queue.push(sequence)
    assert queue.head() is order[0]
    assert len(queue) == 4
    assert [queue.pop() for _ in order] == order
    assert queue.head() is None
    with pytest.raises(IndexError, match="empty"):
        queue.pop()


def test_a_removed_sequence_is_never_returned() -> None:
    queue = WaitingQueue()
    first, second = waiting(1.0), waiting(2.0)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.remove(first)  # a second time changes nothing
    assert len(queue) == 1
    assert queue.pop() is second


def test_removing_costs_a_few_look_ups_each_however_many_wait() -> None:
    queue = WaitingQueue()
    sequences = [waiting(float(place)) for place in range(4000)]
    for sequence in sequences:
        queue.push(sequence)
    Counted.lookups = 0
    for sequence in reversed(sequences):
        queue.remove(sequence)
    assert Counted.lookups < 4 * len(sequences)


def test_removed_sequences_are_not_referenced_forever() -> None:
    queue = WaitingQueue()
    queue.push(waiting(-1.0))  # at the head, so that no other entry surfaces
    left = []
    for place in range(1000):
        sequence = waiting(float(place))
        left.append(weakref.ref(sequence))
        queue.push(sequence)
        queue.remove(sequence)
    del sequence
    assert sum(reference() is not None for reference in left) < 100
