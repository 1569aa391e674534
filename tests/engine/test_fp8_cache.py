"""Keys and values in FP8: optimisations give the same ids, and pages hold more tokens."""

from __future__ import annotations

import asyncio
import random

import pytest

import aengine
from aengine.errors import ConfigError

pytestmark = pytest.mark.anyio

RNG = random.Random(11)
SHARED = [RNG.randrange(300, 4000) for _ in range(37)]
PROMPTS = [
    (SHARED if number % 2 else []) + [RNG.randrange(300, 4000) for _ in range(RNG.randint(1, 40))]
    for number in range(12)
]
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


def engine(**knobs: object) -> aengine.Engine:
    return aengine.Engine(device="cpu", **{"kv_cache_dtype": "fp8", "kv_cache_gib": 0.05, "max_num_seqs": 16, **knobs})


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The ids of each request by itself, one after the other."""

    async def alone() -> list[tuple[int, ...]]:
        async with engine(prefix_cache=False, lookahead=False) as slow:
            return [(await slow.complete(prompt, **GREEDY)).token_ids for prompt in PROMPTS]

    return asyncio.run(alone())


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"num_pages": 45, "page_size": 3, "max_model_len": 128},
        pytest.param({"max_step_tokens": 16}, marks=pytest.mark.slow),
    ],
    ids=["together", "preempted", "in chunks"],
)
async def test_ids_are_those_of_requests_alone(knobs: dict[str, object], expected: list[tuple[int, ...]]) -> None:
    async with engine(**knobs) as fast:
        completions = await asyncio.gather(*(fast.complete(prompt, **GREEDY) for prompt in PROMPTS))
        fast.check_integrity()
        assert [completion.token_ids for completion in completions] == expected
        assert (fast.stats().preemptions > 0) == ("num_pages" in knobs)


async def test_a_cached_prefix_and_forks_give_the_same_ids() -> None:
    async with engine() as warm:
        await warm.complete([*SHARED, 399], **GREEDY)
        hit = await warm.complete([*SHARED, 301, 302], **GREEDY)
        assert hit.usage.cached_tokens == 32
        forked = await warm.complete([*SHARED, 301, 302], n=3, **GREEDY)  # from the middle of a page
        warm.check_integrity()
    async with engine(prefix_cache=False) as cold:
        alone = await cold.complete([*SHARED, 301, 302], **GREEDY)
    assert hit.token_ids == alone.token_ids
    assert [choice.token_ids for choice in forked.choices] == [alone.token_ids] * 3


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float32", 4)])
async def test_the_same_memory_holds_more_pages(dtype: str, times: int) -> None:
    pages = []
    for kept in ("auto", "fp8"):
        async with engine(dtype=dtype, kv_cache_dtype=kept, kv_cache_gib=0.01) as one:
            pages.append(one.stats().pages_total + 1)
    assert pages[1] // times == pages[0]


async def test_what_cannot_be_kept_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*'int8'"):
        engine(kv_cache_dtype="int8")
