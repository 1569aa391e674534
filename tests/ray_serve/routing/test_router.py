"""The prefix router prefers cached prefixes unless the wait there is longer, forgets evicted ones, and stays small."""

from __future__ import annotations

import time
from collections import Counter
from math import inf
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aengine.ray_serve.routing.index import PrefixIndex
from aengine.ray_serve.routing.load import Report, Speed
from aengine.ray_serve.routing.prompt import prompt_from_text
from aengine.ray_serve.routing.router import PrefixRouter

SPEED = Speed(prefill=1e-4, step=1e-3, rows=64)


def router(replicas: int, **options: int) -> PrefixRouter[int]:
    made: PrefixRouter[int] = PrefixRouter(seed=0, **options)
    for replica in range(replicas):
        made.join(replica, SPEED)
    return made


def test_a_chats_turns_stick() -> None:
    made, rng, now = router(16), Random(0), 0.0
    for _ in range(20):
        text, homes = rng.randbytes(1000), set()
        for turn in range(6):
            prompt, now = prompt_from_text(text), now + 1
            home = made.choose(prompt, now)
            assert made.sent(home, prompt, now) == (0 if turn == 0 else pytest.approx((len(text) - 600) / 4, rel=0.1))
            made.ended(home)
            homes.add(home)
            text += rng.randbytes(600)
        assert len(homes) == 1


def test_a_hot_prefix_spreads_and_no_further_than_the_load_demands() -> None:
    made, rng = router(16), Random(0)
    hot = rng.randbytes(8000)  # 0.2 s of work
    homes: Counter[int] = Counter()
    made.sent(3, prompt_from_text(hot), 0.0)
    made.ended(3)
    for number in range(400):  # all at once, after that work is done
        prompt = prompt_from_text(hot + rng.randbytes(100))
        home = made.choose(prompt, 1.0)
        made.sent(home, prompt, 1.0)
        homes[home] += 1
        assert number > 20 or len(homes) == 1
    assert len(homes) > 8
    assert max(homes.values()) < 3 * 400 / len(homes)


def test_a_busy_replica_is_left_exactly_when_computing_elsewhere_is_sooner() -> None:
    made = router(2)
    prompt = prompt_from_text(b"x" * 4000)  # 1,000 tokens: 0.1 s, which the other replica would have to compute
    made.sent(0, prompt, 0.0)
    made.ended(0)
    work = prompt_from_text(Random(1).randbytes(3200))  # 0.08 s
    made.sent(0, work, 10.0)
    assert made.choose(prompt, 10.0) == 0
    made.sent(0, prompt_from_text(Random(2).randbytes(1600)), 10.0)  # 0.12 s together
    assert made.choose(prompt, 10.0) == 1
    assert made.choose(prompt, 10.1) == 0  # that work is nearly done


def test_prompts_without_a_first_token_are_still_ahead_however_long_they_take() -> None:
    made, rng = router(2), Random(3)
    prompts = [prompt_from_text(rng.randbytes(4000)) for _ in range(4)]  # 0.1 s each, when the replicas were measured
    for prompt in prompts:
        made.sent(0, prompt, 0.0, reports_start=True)
    made.started(0, prompts[0].tokens, 1.0)  # ten times slower
    made.sent(1, prompt_from_text(rng.randbytes(8000)), 1.0)
    new = prompt_from_text(rng.randbytes(400))
    assert made.choose(new, 1.0) == 1  # 0.2 s ahead, and 0.3 s on the other
    for prompt in prompts[1:]:
        made.started(0, prompt.tokens, 1.01)
        made.ended(0)
    assert made.choose(new, 1.01) == 0


def test_unreported_prompts_stay_ahead_when_others_start() -> None:
    made, rng = router(2), Random(4)
    first, second = prompt_from_text(rng.randbytes(400)), prompt_from_text(rng.randbytes(8000))
    made.sent(0, first, 0.0, reports_start=True)
    made.sent(0, second, 0.0)  # done at 0.21 s
    made.started(0, first.tokens, 0.01)
    made.sent(1, prompt_from_text(rng.randbytes(4000)), 0.01)
    assert made.choose(prompt_from_text(rng.randbytes(400)), 0.05) == 1


def test_without_running_requests_no_work_is_ahead() -> None:
    made, rng = router(2), Random(5)
    for _ in range(3):
        made.sent(0, prompt_from_text(rng.randbytes(40_000)), 0.0, reports_start=True)  # 1 s each
        made.sent(0, prompt_from_text(rng.randbytes(40_000)), 0.0)
    made.sent(1, prompt_from_text(rng.randbytes(400)), 0.0)
    assert made.choose(prompt_from_text(rng.randbytes(400)), 0.0) == 1
    for _ in range(6):
        made.ended(0)  # without a first token
    assert made.choose(prompt_from_text(rng.randbytes(400)), 0.0) == 0
    made.check_integrity()


def test_ties_go_to_the_less_busy() -> None:
    made = router(3)
    made.sent(0, prompt_from_text(b""), 0.0)
    made.sent(1, prompt_from_text(b""), 0.0)
    assert made.choose(prompt_from_text(b"new" * 100), 0.0) == 2


def test_evicted_keys_are_forgotten() -> None:
    made, prompt = router(2), prompt_from_text(b"y" * 4000)
    made.sent(0, prompt, 0.0)
    made.ended(0)
    assert made.cached_tokens(0, prompt) > 900
    made.evicted(0, prompt.keys[5:])
    assert made.cached_tokens(0, prompt) == prompt.ends[4]
    made.cleared(0)
    assert made.cached_tokens(0, prompt) == 0
    made.stored(0, prompt.keys)  # another router sent it
    assert made.cached_tokens(0, prompt) > 900
    made.check_integrity()


def test_reported_requests_of_other_routers_count() -> None:
    made = router(2)
    made.reported(0, Report(running=40, waiting=0, speed=SPEED))
    assert {made.choose(prompt_from_text(b""), 0.0) for _ in range(20)} == {1}


def test_ended_requests_of_this_router_are_not_counted_as_load_of_others() -> None:
    made, prompt = router(2), prompt_from_text(b"v" * 800)
    made.sent(0, prompt, 0.0)
    made.ended(0)
    made.reported(0, Report(running=40, speed=SPEED, by_router={"me": 40}), "me")  # a second old
    assert {made.choose(prompt, 10.0) for _ in range(20)} == {0}


def test_a_replica_that_left_gets_no_requests_and_may_join_again() -> None:
    made, prompt = router(3), prompt_from_text(b"z" * 4000)
    made.sent(1, prompt, 0.0)
    made.leave(1)
    made.ended(1)  # its streams end later
    assert 1 not in {made.choose(prompt, 1.0) for _ in range(50)}
    made.join(1, SPEED)
    assert made.cached_tokens(1, prompt) == 0
    for replica in (0, 1, 2):
        made.leave(replica)
    with pytest.raises(LookupError):
        made.choose(prompt, 2.0)
    made.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 40)), max_size=60))
def test_memory_is_bounded(sends: list[tuple[int, int, int]]) -> None:
    index = PrefixIndex(max_keys=100)
    for slot in range(4):
        index.join(slot)
    for slot, chain, length in sends:
        index.add(slot, [chain * 1000 + place for place in range(length)])
        assert len(index) <= 100
        assert index.slot_depth(slot, [chain * 1000 + place for place in range(length)]) == min(length, 25)
    index.check_integrity()


def test_without_a_bound_there_is_room_for_each_replicas_keys_and_no_end_of_replicas() -> None:
    def most(slots: int, expected: int) -> int:
        index = PrefixIndex()
        for slot in range(slots):
            index.join(slot)
        index.add(0, range(expected + 1))
        return len(index)

    for slots, expected in ((1, 2**20), (64, 2**14), (1024, 2**12), (4096, 2**11)):
        assert most(slots, expected) == expected


SPEEDS = (SPEED, Speed(prefill=1e-3, step=1e-3, rows=64), Speed(prefill=1e-5, step=1e-2, rows=8))


@given(
    st.lists(st.sampled_from(SPEEDS), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), st.integers(0, 40)), max_size=24),
    st.integers(0, 8),
    st.integers(0, 3),
)
@example([SPEED, SPEED], [(0, 0, 3), (1, 0, 1)], 0, 0)  # the second holds less and has a shorter queue
def test_no_replica_that_is_compared_would_be_sooner(
    speeds: list[Speed], sends: list[tuple[int, int, int]], reports: int, asked: int
) -> None:
    """All replicas are compared if they are few; else all holders of any prefix, if these are few."""
    made: PrefixRouter[int] = PrefixRouter(seed=0)
    texts = [bytes([number]) * 200 + Random(number).randbytes(4000) for number in range(4)]
    for replica, speed in enumerate(speeds):
        made.join(replica, speed)
    for replica in range(min(reports, len(speeds))):  # its speed differs from the first estimate
        speeds[replica] = SPEEDS[(reports + replica) % 3]
        made.reported(replica, Report(speed=speeds[replica]))
    for replica, text, length in sends:
        made.sent(replica % len(speeds), prompt_from_text(texts[text][: length * 100]), 0.0)
    prompt = prompt_from_text(texts[asked])

    def cost(replica: int) -> float:
        missing = prompt.tokens - made.cached_tokens(replica, prompt)
        return made._loads[made._slots[replica]].delay(0.0) + missing * speeds[replica].prefill

    compared = [one for one in made.replicas if len(speeds) <= 4 or made.cached_tokens(one, prompt)]
    least = min(map(cost, compared), default=inf)
    assert cost(made.choose(prompt, 0.0)) <= least * (1 + 1e-9)


class Machine(RuleBasedStateMachine):
    """Random joins, sends, evictions and losses against a plain dictionary of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.router: PrefixRouter[int] = PrefixRouter(seed=0)
        self.held: dict[int, set[int]] = {}
        self.now = 0.0

    @rule(replica=st.integers(0, 4))
    def join(self, replica: int) -> None:
        self.router.join(replica, SPEED)
        self.held.setdefault(replica, set())

    @rule(replica=st.integers(0, 4))
    def leave(self, replica: int) -> None:
        self.router.leave(replica)
        self.held.pop(replica, None)

    @rule(text=st.sampled_from([b"a", b"b", b"ab"]), length=st.integers(0, 2000), wait=st.floats(0, 1))
    def send(self, text: bytes, length: int, wait: float) -> None:
        self.now += wait
        prompt = prompt_from_text((text * 2000)[:length])
        if self.held:
            chosen = self.router.choose(prompt, self.now)
            depth = next((at for at, key in enumerate(prompt.keys) if key not in self.held[chosen]), len(prompt.keys))
            cached = self.router.sent(chosen, prompt, self.now, reports_start=length % 2 == 1)
            assert cached == (prompt.ends[depth - 1] if depth else 0)
            self.held[chosen] |= set(prompt.keys)

    @rule(replica=st.integers(0, 4), tokens=st.integers(0, 1000), ago=st.floats(0, 1), running=st.integers(0, 300))
    def tell(self, replica: int, tokens: int, ago: float, running: int) -> None:
        self.router.started(replica, tokens, self.now - ago)
        self.router.ended(replica)
        self.router.reported(replica, Report(running=running, speed=SPEED))

    @rule(replica=st.integers(0, 4), text=st.sampled_from([b"a", b"b", b"ab"]), kept=st.integers(0, 30))
    def evict(self, replica: int, text: bytes, kept: int) -> None:
        gone = prompt_from_text(text * 2000).keys[kept:]
        self.router.evicted(replica, gone)
        if replica in self.held:
            self.held[replica] -= set(gone)

    @invariant()
    def sound(self) -> None:
        self.router.check_integrity()
        assert set(self.router.replicas) == set(self.held)


TestMachine = Machine.TestCase


@pytest.mark.alone
def test_a_decision_among_1024_replicas_takes_50_us_at_most() -> None:
    made, rng = router(1024), Random(0)
    hot, chats = rng.randbytes(16_000), [rng.randbytes(8000) for _ in range(2000)]
    prompts = [
        prompt_from_text(hot + rng.randbytes(400)) if rng.random() < 0.3 else prompt_from_text(rng.choice(chats))
        for _ in range(8000)
    ]
    spent = []
    for number, prompt in enumerate(prompts):
        now = number * 1e-3
        began = time.thread_time()
        home = made.choose(prompt, now)
        spent.append(time.thread_time() - began)
        made.sent(home, prompt, now)
        if number % 2:
            made.ended(home)
    assert sum(spent) / len(spent) < 50e-6
