"""Logprobs of the prompt's own tokens: their values, and that no cache, chunk or preemption changes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import aengine
from aengine.model.loading.hub import resolve_model
from aengine.runtime.step import scoring
from aengine.types import PromptLogprob
from tests.demo_reference import load_demo
from tests.engine.conftest import idle

pytestmark = pytest.mark.anyio

PROMPT = "The capital of France is Paris. One two three four five six. " * 3


def numbers(scores: Sequence[PromptLogprob] | None) -> list[tuple[int, float, int]]:
    """Compare with another run up to rounding, which may swap neighbours."""
    assert scores is not None
    return [
        (score.token_id, pytest.approx(score.logprob, abs=1e-3), pytest.approx(score.rank, abs=2)) for score in scores
    ]


def plainly(scores: Sequence[PromptLogprob] | None) -> list[tuple[int, float, int]]:
    assert scores is not None
    return [(score.token_id, score.logprob, score.rank) for score in scores]


async def test_they_are_those_of_transformers(engine: aengine.Engine) -> None:
    ids = await engine.tokenizer.encode(PROMPT)
    completion = await engine.complete(ids, max_tokens=1, prompt_logprobs=3)
    scores = completion.choices[0].prompt_logprobs
    assert scores is not None
    folder = resolve_model(None, None)
    model = load_demo(folder)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    assert [score.token_id for score in scores] == ids[1:]
    for score, row in zip(scores, expected, strict=True):
        own = row[score.token_id]
        assert score.logprob == pytest.approx(own.item(), abs=1e-3)
        assert score.rank == pytest.approx(int((row > own).sum()) + 1, abs=2)
        assert list(score.top) == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        assert len(score.top_ids) == 3


async def test_they_are_those_of_the_draws(engine: aengine.Engine) -> None:
    drawn = await engine.complete("Once upon", max_tokens=20, temperature=1.5, seed=3, logprobs=2, ignore_eos=True)
    ids = [*await engine.tokenizer.encode("Once upon"), *drawn.token_ids]
    scored = (await engine.complete(ids, max_tokens=1, prompt_logprobs=2)).choices[0].prompt_logprobs
    assert scored is not None
    assert drawn.logprobs is not None
    for one, other in zip(scored[-20:], drawn.logprobs, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert list(one.top_ids) == [top.token_id for top in other.top]


async def test_only_requests_that_want_them_get_them(engine: aengine.Engine) -> None:
    plain, zero, single = (
        await engine.complete("a b c", max_tokens=1),
        await engine.complete("a b c", max_tokens=1, prompt_logprobs=0),
        await engine.complete([5], max_tokens=1, prompt_logprobs=1),
    )
    assert plain.choices[0].prompt_logprobs is None
    assert all(score.top == [] for score in zero.choices[0].prompt_logprobs or ())
    assert single.choices[0].prompt_logprobs == []


async def test_an_output_that_follows_a_grammar_has_them_too(engine: aengine.Engine) -> None:
    form = aengine.Structured(choice=("yes", "no"))
    plain, structured, *_ = await asyncio.gather(
        engine.complete(PROMPT, max_tokens=4, prompt_logprobs=2),
        engine.complete(PROMPT, max_tokens=4, prompt_logprobs=2, structured=form, n=2),
        *(engine.complete("Once upon", max_tokens=20, ignore_eos=True) for _ in range(3)),
    )
    assert {choice.text for choice in structured.choices} <= {"yes", "no"}
    for choice in structured.choices:
        assert plainly(choice.prompt_logprobs) == numbers(plain.choices[0].prompt_logprobs)


async def test_the_cache_is_not_read_for_them_but_filled_by_them(engine: aengine.Engine) -> None:
    async def ask(**options: Any) -> aengine.Completion:
        return await engine.complete(PROMPT, max_tokens=1, **options)

    first = await ask(prompt_logprobs=1)
    again = await ask(prompt_logprobs=1, n=3)
    plain = await ask()
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 0)
    assert plain.usage.cached_tokens > 16
    for choice in again.choices:
        assert plainly(choice.prompt_logprobs) == numbers(first.choices[0].prompt_logprobs)


@pytest.mark.slow
async def test_chunks_neighbours_and_preemptions_change_nothing() -> None:
    prompts = [[(7 * place + 13 * number) % 4000 for place in range(150)] for number in range(6)]
    knobs: dict[str, Any] = {"device": "cpu", "progress": False, "max_model_len": 256}
    async with aengine.Engine(**knobs, max_num_seqs=1, num_pages=40) as engine:
        alone = [await engine.complete(ids, max_tokens=40, prompt_logprobs=2, ignore_eos=True) for ids in prompts]
    async with aengine.Engine(**knobs, max_num_seqs=8, num_pages=24, max_step_tokens=32) as engine:
        many = await asyncio.gather(
            *(engine.complete(ids, max_tokens=40, prompt_logprobs=2, ignore_eos=True) for ids in prompts)
        )
        assert engine.stats().preemptions > 0
        await idle(engine)
    for one, other in zip(alone, many, strict=True):
        assert plainly(one.choices[0].prompt_logprobs) == numbers(other.choices[0].prompt_logprobs)


async def test_never_more_logits_at_once_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    score = scoring._score

    def watched(logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(len(logits))
        return score(logits, *rest)

    monkeypatch.setattr(scoring, "_score", watched)
    async with aengine.Engine(
        device="cpu", max_num_seqs=2, num_pages=200, progress=False, max_step_tokens=2048
    ) as engine:
        await engine.complete([5] * 1500, max_tokens=1, prompt_logprobs=1)
    assert max(seen) == scoring.SLICE <= 512
    assert sum(seen) == 1499


@pytest.mark.slow
async def test_a_prompt_preempted_halfway_is_scored_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    score = scoring._score

    def watched(logits: torch.Tensor, *rest: Any) -> Any:
        scored.append(len(logits))
        return score(logits, *rest)

    monkeypatch.setattr(scoring, "_score", watched)
    ids = [(7 * place) % 4000 for place in range(100)]
    knobs: dict[str, Any] = {"device": "cpu", "progress": False, "max_model_len": 140, "page_size": 1}
    async with aengine.Engine(**knobs, max_num_seqs=8, num_pages=150, max_step_tokens=16) as engine:
        alone = await engine.complete(ids, max_tokens=1, prompt_logprobs=1)
        scored.clear()
        others = [await engine.submit([place] * 4, max_tokens=120, ignore_eos=True) for place in range(1, 5)]
        for stream in others:
            await stream.take()
        crowded = await engine.complete(ids, max_tokens=1, prompt_logprobs=1)
        for stream in others:
            stream.abort()
        await idle(engine)
    assert sum(scored) > 99
    assert plainly(crowded.choices[0].prompt_logprobs) == numbers(alone.choices[0].prompt_logprobs)
