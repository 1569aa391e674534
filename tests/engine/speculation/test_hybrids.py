"""Models with recurrent layers speculate: answers and cache hits are those of an engine without speculation."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import aengine
from aengine.model.loading.hub import DEMO
from aengine.types import Completion
from tests.engine.conftest import idle
from tests.engine.speculation.answers import (
    KNOBS,
    REQUESTS,
    Request,
    answers,
    assert_same,
    book_of,
    speculating,
)
from tests.engine.speculation.replay import Drafts
from tests.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.anyio

SLOW = pytest.mark.slow
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PREEMPTING = {"num_pages": 40, "page_size": 8, "max_model_len": 300}
FAMILIES = [
    "qwen3-next",
    pytest.param("demo-hybrid", marks=SLOW),
    pytest.param("granite4-hybrid", marks=SLOW),
    pytest.param("nemotron-h", marks=SLOW),
    pytest.param("falcon-h1", marks=SLOW),
]


@dataclass(frozen=True)
class Subject:
    """A tiny checkpoint, some requests, and the answers of an engine without speculation."""

    folder: Path
    requests: list[Request]
    expected: list[Completion]

    def drafts(self, right: float, most: int = 4) -> Drafts:
        return Drafts(book_of(self.requests, self.expected), right, most)

    def engine(self, drafts: Drafts, **knobs: Any) -> aengine.Engine:
        return speculating(drafts, model=str(self.folder), **knobs)

    def plain(self, **knobs: Any) -> aengine.Engine:
        return aengine.Engine(**(KNOBS | {"model": str(self.folder), "speculation": "off"} | knobs))


def requests() -> list[Request]:
    """Return twelve greedy requests. Their prompts share parts, and their answers are up to 45 tokens long."""
    rng = random.Random(11)
    shared = [rng.randrange(300, 4000) for _ in range(200)]
    prompts = [shared[: rng.choice((0, 64, 130))] + [rng.randrange(300, 4000) for _ in range(n * 7)] for n in range(12)]
    return [(prompt or [300], {"max_tokens": rng.randint(1, 45), **GREEDY}) for prompt in prompts]


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, folder, vocab_size=4096, max_position_embeddings=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    subject = Subject(folder, requests(), [])

    async def ask() -> None:
        async with subject.plain(prefix_cache=False) as engine:
            subject.expected.extend(await answers(engine, subject.requests))

    asyncio.run(ask())
    return subject


VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no lookahead": {"lookahead": False},
    "no prefix cache": {"prefix_cache": False},
    "chunks of 33": {"max_step_tokens": 33},
    "one row": {"max_num_seqs": 1},
    "pages of 1": {"page_size": 1},
    "pages of 128": {"page_size": 128},
    "three snapshots": {"state_snapshots": 3},
    "preempting": PREEMPTING,
    "preempting, three snapshots": {**PREEMPTING, "state_snapshots": 3},
    "two ranks": {"tensor_parallel_size": 2},
}
CASES = [
    ("as it comes", 0.7),
    *(pytest.param(name, 0.7, marks=SLOW) for name in VARIANTS if name != "as it comes"),
    *(pytest.param(name, right, marks=SLOW) for name in ("as it comes", "preempting") for right in (0.0, 1.0)),
]


@pytest.mark.turns("subject")
@pytest.mark.parametrize(("name", "right"), CASES)
async def test_answers_are_those_without_speculation(name: str, right: float, subject: Subject) -> None:
    """All requests run at once, twice, while others are given up. The models take turns: one for each slow case."""

    async def given_up(engine: aengine.Engine, prompt: list[int], after: int) -> None:
        async for _ in engine.generate(prompt[::-1], **GREEDY, max_tokens=60):
            after -= 1
            if after < 0:
                break

    drafts = subject.drafts(right)
    async with subject.engine(drafts, **VARIANTS[name]) as engine:
        for _ in range(2):
            others = [asyncio.ensure_future(given_up(engine, prompt, n)) for n, (prompt, _) in enumerate(REQUESTS[:5])]
            assert_same(await answers(engine, subject.requests), subject.expected, subject.requests)
            await asyncio.gather(*others)
        await idle(engine)
        stats = engine.stats()
    assert (drafts.accepted > 0) == (right > 0)
    assert (drafts.accepted < drafts.verified) or right == 1.0
    if "preempting" in name:
        assert stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 16])
async def test_any_number_of_drafts(most: int, subject: Subject) -> None:
    async with subject.engine(subject.drafts(0.9, most)) as engine:
        assert_same(await answers(engine, subject.requests), subject.expected, subject.requests)


@pytest.mark.slow
async def test_every_way_to_draw_gives_the_same(subject: Subject) -> None:
    async with subject.plain(prefix_cache=False) as plain:
        expected = await answers(plain, REQUESTS)
    async with subject.engine(Drafts(book_of(REQUESTS, expected), 0.8)) as engine:
        assert_same(await answers(engine, REQUESTS), expected, REQUESTS)


async def test_repetitions_are_drafted_and_accepted(subject: Subject) -> None:
    """The answers consist of two tokens, so they repeat themselves."""
    asked = [(prompt, params | {"allowed_token_ids": [300, 301]}) for prompt, params in subject.requests]
    async with subject.plain() as plain:
        expected = await answers(plain, asked)
        steps = plain.stats().steps
    async with subject.plain(speculation="ngram") as engine:
        assert_same(await answers(engine, asked), expected, asked)
        assert engine.stats().steps < 0.7 * steps


async def talk(engine: aengine.Engine) -> tuple[list[Request], list[Completion]]:
    """Run a chat of several turns. Each turn begins with all that was said before."""
    rng = random.Random(5)
    history: list[int] = []
    requests: list[Request] = []
    turns: list[Completion] = []
    for _ in range(4):
        history += [rng.randrange(300, 4000) for _ in range(rng.randint(3, 80))]
        requests.append((list(history), {"max_tokens": rng.randint(30, 80), **GREEDY}))
        turns.append(await engine.complete(history, **requests[-1][1]))
        history += turns[-1].token_ids
    await idle(engine)
    return requests, turns


def hits(completions: Sequence[Completion]) -> list[int]:
    return [completion.usage.cached_tokens for completion in completions]


@pytest.mark.parametrize(
    ("lookahead", "right"),
    [
        (True, 0.7),
        pytest.param(False, 0.7, marks=SLOW),
        *(pytest.param(True, right, marks=SLOW) for right in (0.0, 1.0)),
    ],
)
@pytest.mark.turns("subject")
async def test_the_next_turn_of_a_chat_hits_as_much(lookahead: bool, right: float, subject: Subject) -> None:
    """The models take turns: one for each slow case."""
    async with subject.plain() as plain:
        asked, expected = await talk(plain)
    assert all(hits(expected)[1:])
    async with subject.engine(Drafts(book_of(asked, expected), right), lookahead=lookahead) as engine:
        _, found = await talk(engine)
        assert engine.stats().state_snapshots_used > 0
    assert_same(found, expected, asked)
    assert hits(found) == hits(expected)


@pytest.mark.slow
@pytest.mark.parametrize("right", [0.7, 1.0])
async def test_a_state_is_found_wherever_the_answer_ends(right: float, subject: Subject) -> None:
    """A state is kept after 128 tokens. The answers end up to six tokens before and after that."""
    prompts = [[300 + number, *range(400, 449)] for number in range(13)]
    asked = [(prompt, {"max_tokens": 73 + number, **GREEDY}) for number, prompt in enumerate(prompts)]

    async def twice(engine: aengine.Engine) -> tuple[list[Completion], list[int]]:
        """Return the answers, and the hits of second turns that begin with them."""
        first = await answers(engine, asked)
        later = [([*prompt, *one.token_ids, 301], {"max_tokens": 1, **GREEDY}) for prompt, one in zip(prompts, first)]
        return first, hits(await answers(engine, later))

    async with subject.plain(kv_cache_gib=0.2) as plain:
        expected, found = await twice(plain)
    assert found == [64] * 6 + [128] * 7
    async with subject.engine(Drafts(book_of(asked, expected), right), kv_cache_gib=0.2) as engine:
        again, found = await twice(engine)
    assert_same(again, expected, asked)
    assert found == [64] * 6 + [128] * 7


async def test_choices_fork_with_the_state(subject: Subject) -> None:
    async with subject.engine(subject.drafts(0.7), max_num_seqs=5) as engine:
        forked = [(prompt, {**params, "n": 4}) for prompt, params in subject.requests[:6]]
        for answer, one in zip(await answers(engine, forked), subject.expected):
            assert [choice.token_ids for choice in answer.choices] == [one.token_ids] * 4
