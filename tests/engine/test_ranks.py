"""A model over several ranks gives the same ids as on one (float32), for all options and under load."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aengine
from aengine.errors import ConfigError, EngineClosedError, EngineFailedError
from aengine.kernels.collective.threads import ThreadCollective
from aengine.requests.structured import Structured
from aengine.runtime.runner import StepExecutor
from aengine.runtime.startup import start_torch
from aengine.types import Choice, Completion

from .conftest import idle
from .test_lifetime import rest

pytestmark = pytest.mark.anyio

RNG = random.Random(17)
SHARED = [RNG.randrange(300, 4000) for _ in range(37)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1, "logprobs": 3},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 20, "n": 3},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.7, "seed": 3, "logit_bias": {400: 3.0, 401: -5.0}, "min_p": 0.05, "min_tokens": 5},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 0.7, "seed": 4, "structured": Structured(regex="[a-z]{3,9}( [0-9]+)*"), "ignore_eos": False},
    {"temperature": 0, "n": 2, "logprobs": 1, "bad_words": ["the", " a"]},
]
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (
        (SHARED if number % 3 else []) + [RNG.randrange(300, 4000) for _ in range(RNG.randint(1, 50))],
        {"max_tokens": RNG.randint(4, 20), "ignore_eos": True, **kind},
    )
    for number, kind in enumerate(KINDS * 2)
]
PREEMPTING = {"num_pages": 60, "page_size": 3, "max_model_len": 128}
LAST = pytest.mark.slow


def engine(ranks: int, **knobs: object) -> aengine.Engine:
    usual = {"max_num_seqs": 32, "kv_cache_gib": 0.1, "tensor_parallel_size": ranks, "torch_threads": 1}
    return aengine.Engine(device="cpu", **{**usual, **knobs})


async def run(ranks: int, **knobs: object) -> tuple[list[Completion], aengine.Stats]:
    async with engine(ranks, **knobs) as one:
        completions = await asyncio.gather(*(one.complete(prompt, **asked) for prompt, asked in REQUESTS))
        one.check_integrity()
        return list(completions), one.stats()


def alone(**knobs: object) -> list[Completion]:
    """The ids of each request by itself, on one rank."""

    async def answers() -> list[Completion]:
        async with engine(1, prefix_cache=False, lookahead=False, **knobs) as one:
            return [await one.complete(prompt, **asked) for prompt, asked in REQUESTS]

    return asyncio.run(answers())


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return alone()


def assert_equal(completions: list[Completion], expected: list[Completion]) -> None:
    for ours, theirs, (_, asked) in zip(completions, expected, REQUESTS, strict=True):
        for choice, other in zip(ours.choices, theirs.choices, strict=True):
            assert choice.token_ids == other.token_ids, asked
            assert (choice.text, choice.finish_reason) == (other.text, other.finish_reason)
            assert numbers(choice) == pytest.approx(numbers(other), abs=1e-3)


def numbers(choice: Choice) -> list[float]:
    """Return all logprobs: of drawn tokens, of the prompt, and of the candidates."""
    drawn, prompt = choice.logprobs or (), choice.prompt_logprobs or ()
    best = [one.logprob for score in drawn for one in score.top] + [value for score in prompt for value in score.top]
    return [score.logprob for score in (*drawn, *prompt)] + best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "knobs"),
    [
        (2, {}),
        (2, PREEMPTING),
        (2, {"lookahead": False}),
        (2, {"max_step_tokens": 8, "max_num_seqs": 8}),
        (2, {"max_num_seqs": 3}),
        (2, {"prefix_cache": False}),
        (4, {"max_step_tokens": 24, "max_num_seqs": 24}),
        (4, {}),
        (4, PREEMPTING),
        (8, {}),
        (8, PREEMPTING),
        (8, {"lookahead": False}),
    ],
    ids=str,
)
async def test_ids_are_those_of_one_rank(ranks: int, knobs: dict[str, object], expected: list[Completion]) -> None:
    completions, stats = await run(ranks, **knobs)
    assert_equal(completions, expected)
    assert (stats.preemptions > 0) == ("num_pages" in knobs)


@pytest.mark.parametrize(
    ("ranks", "knobs"),
    [(2, {}), (4, PREEMPTING), (8, {})],
    ids=str,
)
@pytest.mark.slow
async def test_with_keys_and_values_in_fp8(ranks: int, knobs: dict[str, object]) -> None:
    completions, _ = await run(ranks, kv_cache_dtype="fp8", **knobs)
    expected = await asyncio.to_thread(alone, kv_cache_dtype="fp8")
    for ours, theirs in zip(completions, expected, strict=True):
        assert [one.token_ids for one in ours.choices] == [one.token_ids for one in theirs.choices]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
async def test_requests_given_up_in_the_middle_leave_the_others_alone(ranks: int, expected: list[Completion]) -> None:
    chance = random.Random(ranks)

    async def given_up(one: aengine.Engine, prompt: list[int], after: int) -> None:
        async for _ in one.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True):
            after -= 1
            if after < 0:
                break

    async with engine(ranks, **PREEMPTING) as one:
        others = [given_up(one, prompt, chance.randint(0, 20)) for prompt, _ in REQUESTS]
        wanted = [one.complete(prompt, **asked) for prompt, asked in REQUESTS]
        both = [work for pair in zip(others, wanted, strict=True) for work in pair]
        assert_equal((await asyncio.gather(*both))[1::2], expected)
        one.check_integrity()


async def test_a_cached_prefix_serves_all_ranks() -> None:
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    async with engine(1, prefix_cache=False) as one:
        cold = await one.complete([*SHARED, 301, 302], **greedy)
    async with engine(4) as several:
        await several.complete([*SHARED, 399], **greedy)
        hit = await several.complete([*SHARED, 301, 302], **greedy)
        assert hit.usage.cached_tokens == 32
        assert hit.token_ids == cold.token_ids


async def test_closing_with_a_step_in_flight_ends_streams_and_threads() -> None:
    before = set(threading.enumerate())
    async with engine(4) as one:
        streams = [await one.submit([300 + i, 301], temperature=0, max_tokens=2000, ignore_eos=True) for i in range(3)]
        await streams[0].take()
        assert any(thread.name.startswith("aengine-rank-3") for thread in threading.enumerate())
    for stream in streams:
        with pytest.raises(EngineClosedError):
            await rest(stream)
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in left if name.startswith(("aengine-rank", "aengine-forward"))] == []


class Stumbled(Exception):
    """An error of one rank."""


class Stumbling:
    """Lets one rank raise at a chosen point of its next step."""

    def __init__(self, rank: int, where: str, meeting: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed = False
        self._rank = rank
        self._countdown = meeting
        if where == "meeting":
            monkeypatch.setattr(ThreadCollective, "sum", self._around(ThreadCollective.sum))
        else:
            monkeypatch.setattr(StepExecutor, where, self._around(getattr(StepExecutor, where)))

    def _around(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def stumbling(one: ThreadCollective | StepExecutor, *arguments: Any) -> Any:
            own = one if isinstance(one, ThreadCollective) else one._decoder.ranks
            if self.armed and own is not None and own.index == self._rank:
                self._countdown -= 1
                if self._countdown == 0:
                    self.armed = False
                    raise Stumbled
            return usual(one, *arguments)

        return stumbling


@pytest.mark.parametrize(
    ("rank", "where", "meeting"),
    [
        pytest.param(2, "forward", 1, marks=LAST),
        pytest.param(0, "forward", 1, marks=LAST),
        pytest.param(2, "meeting", 1, marks=LAST),
        pytest.param(0, "meeting", 4, marks=LAST),
        (2, "meeting", 7),
        pytest.param(0, "_copy_pages", 1, marks=LAST),
        pytest.param(2, "_copy_pages", 1, marks=LAST),
        pytest.param(0, "draw", 1, marks=LAST),
        pytest.param(2, "draw", 1, marks=LAST),
    ],
)
async def test_a_step_that_fails_on_one_rank_fails_on_all_and_the_next_requests_are_right(
    rank: int, where: str, meeting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first exchange with the others, at an exchange, after the last one, and in its draws."""
    stumbling = Stumbling(rank, where, meeting, monkeypatch)
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    prompts = [[*SHARED, 301, 302 + number] for number in range(3)]
    async with engine(1) as one:
        expected = [await one.complete(prompt, **greedy) for prompt in prompts]
    async with engine(4, max_num_seqs=2) as one:
        async with asyncio.timeout(60):
            running = [await one.submit(prompt, **greedy) for prompt in prompts[:2]]
            for stream in running:
                await stream.take()
            waiting = await one.submit(prompts[2], **greedy)
            stumbling.armed = True
            for stream in running:
                with pytest.raises(EngineFailedError, match="Stumbled"):
                    await rest(stream)
            assert await rest(waiting) == expected[2].token_ids
            again = await asyncio.gather(*(one.complete(prompt, **greedy) for prompt in prompts))
        assert [completion.token_ids for completion in again] == [other.token_ids for other in expected]
        await idle(one)


async def test_only_numbers_of_ranks_that_hosts_have_are_taken() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        engine(3)


async def test_the_pools_of_all_ranks_have_to_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_torch, "host_memory", lambda: 64 * 2**20)
    async with engine(1, kv_cache_gib=None, num_pages=1200):  # of 32 KiB; each rank has half of a page
        pass
    with pytest.raises(ConfigError, match="num_pages"):
        async with engine(8, kv_cache_gib=None, num_pages=1200):
            pass
