"""Requests that are given up, steps that fail, sleep and new weights: nothing leaks, and other answers stay exact."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

import aengine
from aengine.errors import EngineFailedError, NonFiniteLogitsError
from aengine.model.decoder import Decoder
from aengine.types import Completion
from tests.engine.checkpoints import other_demo
from tests.engine.conftest import idle
from tests.engine.speculation.answers import (
    REQUESTS,
    Request,
    answers,
    assert_same,
    book_of,
    speculating,
    without_speculation,
)
from tests.engine.speculation.replay import Drafts, ReplayProposer
from tests.engine.test_lifetime import rest

pytestmark = pytest.mark.anyio

PREEMPTING: dict[str, Any] = {"num_pages": 60, "page_size": 3, "max_model_len": 128}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 30, "logprobs": 1}
PROMPTS = [list(range(start, start + 20)) for start in (300, 1300, 2300)]
ALONE: list[Request] = [(prompt, GREEDY) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return asyncio.run(without_speculation(REQUESTS))


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    return asyncio.run(without_speculation(ALONE))


async def give_up(engine: aengine.Engine, request: Request, after: int) -> None:
    """Abort a request after some fragments, or before the first one. Integrity is checked at each fragment."""
    prompt, params = request
    stream = await engine.submit(prompt, **params)
    try:
        for _ in range(after):
            if not await stream.take():
                break
            engine.check_integrity()
    finally:
        stream.abort()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("seed", "knobs"),
    [
        (0, PREEMPTING),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {"max_num_seqs": 3}, marks=pytest.mark.slow),
        pytest.param(3, {"max_step_tokens": 32, "lookahead": False}, marks=pytest.mark.slow),
        pytest.param(4, PREEMPTING | {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(5, {"max_step_tokens": 40, "page_size": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_requests_given_up_in_any_phase(seed: int, knobs: dict[str, Any], expected: list[Completion]) -> None:
    """Some wait, some are in the middle of their prompt, the others verify drafts."""
    rng = random.Random(seed)
    async with speculating(Drafts(book_of(REQUESTS, expected), 0.7, seed=seed), **knobs) as engine:
        wanted = [engine.complete(prompt, **params) for prompt, params in REQUESTS]
        others = [give_up(engine, request, rng.randint(0, 8)) for request in REQUESTS]
        both = [work for pair in zip(others, wanted, strict=True) for work in pair]
        found = (await asyncio.gather(*both))[1::2]
        await idle(engine)
        assert_same(found, expected, REQUESTS)
        assert engine.stats().drafted_tokens > 0


@pytest.mark.parametrize("where", ["propose", pytest.param("admit", marks=pytest.mark.slow)])
async def test_a_proposer_that_fails_ends_its_requests_alone(
    where: str, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_in = 4 if where == "propose" else 1  # rows are admitted in one step
    usual = getattr(ReplayProposer, where)

    def failing(*given: Any) -> None:
        nonlocal fails_in
        fails_in -= 1
        if not fails_in:
            raise ZeroDivisionError
        usual(*given)

    monkeypatch.setattr(ReplayProposer, where, failing)
    async with speculating(Drafts(book_of(ALONE, alone))) as engine:
        with pytest.raises(EngineFailedError):
            await asyncio.gather(*(engine.complete(prompt, **params) for prompt, params in ALONE))
        await idle(engine)
        fails_in = 0
        assert_same(await answers(engine, ALONE), alone, ALONE)


async def test_logits_that_are_not_finite_at_a_refused_draft_are_ignored(
    alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that no one draws leads to NaN. The row continues; it fails only if a token that it keeps does so."""
    bad, usual = 4000, Decoder.forward

    def forward(decoder: Decoder, token_ids: Any, *given: Any, **more: Any) -> Any:
        hidden = usual(decoder, token_ids, *given, **more)
        wanted = given[3] if len(given) > 3 else more.get("wanted")
        ids = token_ids if wanted is None else token_ids[wanted]
        hidden[ids == bad] = float("nan")
        return hidden

    monkeypatch.setattr(Decoder, "forward", forward)
    assert not any(bad in one.token_ids for one in alone)
    drafts = Drafts(book_of(ALONE, alone), right=0.6, wrong=[bad])
    async with speculating(drafts) as engine:
        assert_same(await answers(engine, ALONE), alone, ALONE)
        with pytest.raises(NonFiniteLogitsError):
            await engine.complete([*PROMPTS[0], bad], **GREEDY)
        await idle(engine)
    assert drafts.accepted < drafts.verified


async def test_sleep_between_requests(alone: list[Completion]) -> None:
    async with speculating(Drafts(book_of(ALONE, alone), right=0.8), sleep_mode=True) as engine:
        for _ in range(2):
            running = asyncio.create_task(answers(engine, ALONE))
            while not engine.stats().running:
                await anyio.lowlevel.checkpoint()
            await engine.sleep()
            assert_same(await running, alone, ALONE)
            await engine.wake_up()


async def test_new_weights_between_steps(alone: list[Completion], tmp_path: Path) -> None:
    """Running requests end with the old weights. Drafts continue the old answers even after that."""
    other = str(other_demo(tmp_path / "other"))
    changed = await without_speculation(ALONE, model=other)
    book = book_of(ALONE * 2, alone + changed)
    async with speculating(Drafts(book, right=0.9)) as engine:
        running = asyncio.create_task(answers(engine, ALONE))
        while not engine.stats().running:
            await anyio.lowlevel.checkpoint()
        await engine.reload(other)
        assert_same(await running, alone, ALONE)
        assert_same(await answers(engine, ALONE), changed, ALONE)


async def test_an_engine_that_closes_with_drafts_in_flight(alone: list[Completion]) -> None:
    async with speculating(Drafts(book_of(ALONE, alone), right=0.5)) as engine:
        streams = [await engine.submit(prompt, **params | {"max_tokens": 1000}) for prompt, params in ALONE]
        for stream in streams:
            await stream.take()
    for stream in streams:
        with pytest.raises(aengine.EngineClosedError):
            await rest(stream)
