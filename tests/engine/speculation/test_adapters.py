"""Rows with different adapters and without one verify drafts in the same step, and answer as without speculation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import aengine
from aengine.model.loading import hub
from aengine.types import Completion
from tests.engine.adapters import Written
from tests.engine.speculation.answers import KNOBS, Request, answers, assert_same, book_of, speculating
from tests.engine.speculation.replay import Drafts

pytestmark = pytest.mark.anyio

PROMPTS = [list(range(start, start + 30)) for start in (300, 1300)]
REQUESTS: list[Request] = [
    (prompt, {"max_tokens": 20, "ignore_eos": True, "adapter": adapter, **params})
    for prompt in PROMPTS
    for adapter in (None, "a0", "a1")
    for params in ({"temperature": 0, "logprobs": 1}, {"temperature": 0.9, "seed": 3, "n": 2})
]


@pytest.fixture(scope="module")
def written(shallow_demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "DEMO", shallow_demo)
        yield Written(tmp_path_factory.mktemp("adapters"), 2)


@pytest.fixture(scope="module")
def expected(written: Written) -> list[Completion]:
    async def plain() -> list[Completion]:
        async with aengine.Engine(**KNOBS, lora=written.paths) as engine:
            return await answers(engine, REQUESTS)

    return asyncio.run(plain())


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        pytest.param({"num_pages": 40, "page_size": 4, "max_model_len": 128}, marks=pytest.mark.slow),
        pytest.param({"max_loras": 1, "lookahead": False}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_mixed_rows_answer_as_without_speculation(
    knobs: dict[str, Any], written: Written, expected: list[Completion]
) -> None:
    assert expected[0].token_ids != expected[2].token_ids
    async with speculating(Drafts(book_of(REQUESTS, expected), right=0.8), lora=written.paths, **knobs) as engine:
        assert_same(await answers(engine, REQUESTS), expected, REQUESTS)
        assert engine.stats().accepted_tokens > 0
