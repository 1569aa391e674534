"""All optimisations of the engine give the same ids (float32)."""

from __future__ import annotations

import asyncio
import random

import pytest

import aengine

pytestmark = pytest.mark.anyio

RNG = random.Random(5)
SHARED = [RNG.randrange(300, 4000) for _ in range(37)]
PROMPTS = [
    (SHARED if number % 2 else []) + [RNG.randrange(300, 4000) for _ in range(RNG.randint(1, 60))]
    for number in range(32)
]
PARAMS = [
    {"temperature": 0.0 if number % 3 else 0.9, "seed": number, "max_tokens": RNG.randint(1, 24), "ignore_eos": True}
    for number in range(32)
]

VARIANTS: dict[str, dict[str, object]] = {
    "no lookahead": {"lookahead": False},
    "small pool, preempting": {"num_pages": 60, "page_size": 3, "max_model_len": 128},
    "no prefix cache": {"prefix_cache": False},
    "chunks of 8": {"max_step_tokens": 8, "max_num_seqs": 8},
    "one row": {"max_num_seqs": 1},
    "three rows": {"max_num_seqs": 3},
    "pages of 1": {"page_size": 1},
    "pages of 5": {"page_size": 5},
}


async def run_all(**knobs: object) -> tuple[list[tuple[int, ...]], aengine.Stats]:
    knobs = {"max_num_seqs": 32, "kv_cache_gib": 0.1, **knobs}
    async with aengine.Engine(device="cpu", **knobs) as engine:
        completions = await asyncio.gather(
            *(engine.complete(prompt, **params) for prompt, params in zip(PROMPTS, PARAMS, strict=True))
        )
        engine.check_integrity()
        return [completion.token_ids for completion in completions], engine.stats()


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The ids of each request by itself, one after the other."""

    async def alone() -> list[tuple[int, ...]]:
        async with aengine.Engine(device="cpu", prefix_cache=False, lookahead=False, kv_cache_gib=0.1) as engine:
            return [
                (await engine.complete(prompt, **params)).token_ids
                for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]

    return asyncio.run(alone())


@pytest.mark.slow
async def test_among_31_others_as_alone(expected: list[tuple[int, ...]]) -> None:
    ids, _ = await run_all()
    assert ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
async def test_same_ids(name: str, expected: list[tuple[int, ...]]) -> None:
    ids, stats = await run_all(**VARIANTS[name])
    assert ids == expected
    if "preempting" in name:
        assert stats.preemptions > 0


async def test_a_cached_prefix_changes_nothing_but_the_work() -> None:
    """97 shared tokens, pages of 16: the second request finds 96 and computes 6 of its 102 prompt tokens."""
    shared = [RNG.randrange(300, 4000) for _ in range(97)]
    second = [*shared, 301, 302, 303, 304, 305]
    greedy = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with aengine.Engine(device="cpu", kv_cache_gib=0.1, speculation="off") as engine:
        await engine.complete([*shared, 399], **greedy)
        before = engine.stats()
        warm = await engine.complete(second, **greedy)
        computed = engine.stats().computed_tokens - before.computed_tokens
    async with aengine.Engine(device="cpu", kv_cache_gib=0.1, speculation="off", prefix_cache=False) as engine:
        cold = await engine.complete(second, **greedy)
        cold_computed = engine.stats().computed_tokens
    assert warm.usage.cached_tokens == 96
    assert warm.token_ids == cold.token_ids
    assert computed == 6 + 19 == 25
    assert cold_computed == 102 + 19 == 121
