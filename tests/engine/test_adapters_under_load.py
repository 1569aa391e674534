"""Many requests with many adapters: each gets what it gets alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aengine
from aengine.requests.structured import Structured
from tests.engine.adapters import GREEDY, PROMPT, Written, serving

pytestmark = pytest.mark.anyio


COUNT = 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("adapters"), COUNT)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1, "logprobs": 3},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9, "n": 4},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 0.7, "seed": 4, "structured": Structured(regex="[a-z]{3,9}( [0-9]+)*"), "ignore_eos": False},
    {"temperature": 0, "n": 4, "logprobs": 1, "presence_penalty": 0.5},
]


def requests(names: list[str | None], count: int, seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    chance = random.Random(seed)
    made = []
    for number in range(count):
        prompt = PROMPT[: chance.randint(1, 40)] + [chance.randrange(300, 4000) for _ in range(chance.randint(0, 9))]
        kind = KINDS[number % len(KINDS)]
        options = {"max_tokens": chance.randint(2, 16), "ignore_eos": True, **kind, "adapter": chance.choice(names)}
        made.append((prompt, options))
    return made


def answer(completion: aengine.Completion) -> list[tuple[tuple[int, ...], str, str]]:
    return [(choice.token_ids, choice.text, choice.finish_reason) for choice in completion.choices]


def logprobs(completion: aengine.Completion) -> list[float]:
    scores = [score for choice in completion.choices for score in (*(choice.logprobs or ()),)]
    prompts = [score for choice in completion.choices for score in (*(choice.prompt_logprobs or ()),)]
    return [score.logprob for score in scores] + [score.logprob for score in prompts]


@pytest.fixture(scope="module")
def lone(written: Written) -> list[aengine.Completion]:
    """The ids that each of `REQUESTS` gets without other requests."""

    async def one_by_one() -> list[aengine.Completion]:
        async with serving(lora=written.paths, prefix_cache=False, lookahead=False) as engine:
            return [await engine.complete(prompt, **options) for prompt, options in REQUESTS]

    return asyncio.run(one_by_one())


PREEMPTING: dict[str, Any] = {"num_pages": 45, "page_size": 3, "max_model_len": 128}
REQUESTS = requests([None, *(f"a{number}" for number in range(COUNT))], 24, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_loras": 2, **PREEMPTING},
        pytest.param({"max_loras": 1, "max_num_seqs": 3}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 2, "lookahead": False}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 2, "max_step_tokens": 16, "max_num_seqs": 16}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 2, "tensor_parallel_size": 2, **PREEMPTING}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_however_busy_everyone_gets_what_they_get_alone(
    knobs: dict[str, Any], written: Written, lone: list[aengine.Completion]
) -> None:
    """n, grammars, logprobs, penalties, preemption and several ranks, with more adapters than there is room for."""
    async with serving(lora=written.paths, **knobs) as engine:
        got = await asyncio.gather(*(engine.complete(prompt, **options) for prompt, options in REQUESTS))
        stats = engine.stats()
    for one, other, (_, options) in zip(got, lone, REQUESTS, strict=True):
        assert answer(one) == answer(other), options
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)
    assert (stats.preemptions > 0) == ("num_pages" in knobs)
    assert (stats.adapter_evictions > 0) == ("max_loras" in knobs)


@pytest.mark.slow
async def test_a_burst_over_a_hundred_adapters_with_sixteen_places(tmp_path: Path) -> None:
    """All requests get the right adapter.

    Those with the same adapter enter together, so each is loaded only a few times.
    """
    hundred = Written(tmp_path, 100)
    names = [*hundred.paths]
    async with serving(lora=hundred.paths, max_loras=16, max_num_seqs=64, max_queue=4096) as engine:
        expected = {name: (await engine.complete(PROMPT, adapter=name, **GREEDY)).token_ids for name in names}
        engine.flush_cache()
        before = engine.stats().adapter_loads
        ended: list[str | None] = []

        async def ask(name: str | None) -> tuple[int, ...]:
            got = await engine.complete(PROMPT, adapter=name, **GREEDY)
            ended.append(name)
            return got.token_ids

        burst: list[str | None] = [*names, None] * 3
        got = await asyncio.gather(*(ask(name) for name in burst))
        loads = engine.stats().adapter_loads - before
    assert all(tokens == expected[name] for name, tokens in zip(burst, got, strict=True) if name is not None)
    assert loads <= 200
    assert None in ended[:100]  # requests without an adapter do not wait for those with one
    first = [ended.index(name) for name in names]  # the last 16 are on the device at the start
    assert sum(first[:20]) < sum(first[60:80])


@pytest.mark.slow
async def test_a_stream_of_popular_ones_does_not_starve_a_rare_one(written: Written) -> None:
    async with serving(lora=written.paths, max_loras=2, max_num_seqs=4) as engine:
        popular_served = 0
        rare_done, busy = asyncio.Event(), asyncio.Event()

        async def keep_asking(name: str) -> None:
            nonlocal popular_served
            while not rare_done.is_set():
                await engine.complete(PROMPT, adapter=name, **GREEDY)
                popular_served += 1
                if popular_served >= 8:
                    busy.set()

        popular = [asyncio.create_task(keep_asking(f"a{number % 2}")) for number in range(8)]
        await busy.wait()
        at = popular_served
        with anyio.fail_after(60):
            await engine.complete(PROMPT, adapter="a5", **GREEDY)
        overtook = popular_served - at
        rare_done.set()
        await asyncio.gather(*popular)
    assert overtook <= 24  # two rounds of running and earlier requests, not all later ones
