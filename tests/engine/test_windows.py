"""Models with sliding windows give the same ids when window pages are freed, evicted, found again or copied.

phi3-window is left out: it has the windows of mistral-window, and runs in test_families.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aengine
from tests.engine.many_prompts import GREEDY, ManyPrompts

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MANY = ManyPrompts(seed=8, longest=48)
WINDOW = 20  # tokens; of the layers with a window
CASES = ("mistral-window", "gemma3", "qwen2-window-upper-layer", "gpt-oss", "olmo3")
ALL_SLIDE = ("mistral-window",)

Subject = tuple[Path, list[tuple[int, ...]]]


@pytest.fixture(scope="module", params=CASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A checkpoint, and the ids of transformers for each prompt."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, MANY.write(request.param, folder, vocab_size=4096, max_position_embeddings=1024)


def engine(folder: Path, **knobs: object) -> aengine.Engine:
    common = {"max_num_seqs": 20, "kv_cache_gib": 0.02, "max_model_len": 1000, "progress": False}
    return aengine.Engine(model=str(folder), device="cpu", **{**common, **knobs})


TINY = {"page_size": 8, "max_model_len": 360, "num_pages": 48}
VARIANTS: dict[str, dict[str, object]] = {
    "as it comes": {},
    "no prefix cache": {"prefix_cache": False},
    "no lookahead": {"lookahead": False},
    "small pool, preempting": TINY,
    "few pages of windows": TINY | {"num_pages": 200, "window_context": 400},
    "chunks of 7": {"max_step_tokens": 7, "max_num_seqs": 7},
    "chunks of 33, no lookahead": {"max_step_tokens": 33, "lookahead": False},
    "pages of 1": {"page_size": 1},
    "pages of 128": {"page_size": 128},
}


@pytest.mark.turns("name", count=3)
@pytest.mark.parametrize("name", VARIANTS)
async def test_ids_are_those_of_transformers(name: str, subject: Subject) -> None:
    """Run all prompts twice, the second time from the cache. Each model has three variants, in turns."""
    folder, expected = subject
    async with engine(folder, **VARIANTS[name]) as running:
        assert running.stats().window_pages > 0
        assert await MANY.complete(running) == expected
        before = running.stats()
        assert await MANY.complete(running) == expected
        after = running.stats()
        assert after.window_pages_used == 0
    assert (after.cached_tokens > before.cached_tokens) == (name != "no prefix cache")
    if name == "as it comes":
        assert (after.cached_tokens - before.cached_tokens) / (after.prompt_tokens - before.prompt_tokens) > 0.8
    if "preempting" in name:  # if all layers have a window, no sequence runs out of pages
        assert (after.preemptions > 0) != folder.name.startswith(ALL_SLIDE)


async def test_window_pages_are_freed_while_the_sequence_runs(subject: Subject) -> None:
    """A prompt of 800 tokens and an output of 100 hold pages for a window and for a step."""
    folder, _ = subject
    prompt = MANY.ids(800)
    most = 0
    async with engine(folder, max_step_tokens=64, prefix_cache=False) as running:
        async for _ in running.generate(prompt, max_tokens=100, **GREEDY):
            most = max(most, running.stats().window_pages_used)
            running.check_integrity()
    assert 2 <= most <= -(-(WINDOW + 64 + 64) // 16) + 3


async def test_a_hit_needs_the_last_window_alone(subject: Subject) -> None:
    folder, _ = subject
    prompt = MANY.ids(800)
    others = [MANY.ids(60) for _ in range(40)]
    pages = 40 if folder.name.startswith(ALL_SLIDE) else 2000
    async with engine(folder, window_context=1000, num_pages=pages, max_num_seqs=2) as running, engine(folder) as plain:
        expected = (await plain.complete(prompt, max_tokens=20, **GREEDY)).token_ids
        first = await running.complete(prompt, max_tokens=20, **GREEDY)
        stats = running.stats()
        assert stats.window_pages < 800 // 16  # fewer than the prompt has pages
        again = await running.complete(prompt, max_tokens=20, **GREEDY)
        assert first.token_ids == again.token_ids == expected
        assert again.usage.cached_tokens == 784
        for other in others:  # until that window is evicted
            await running.complete(other, max_tokens=1, **GREEDY)
        gone = await running.complete(prompt, max_tokens=20, **GREEDY)
        assert gone.usage.cached_tokens == 0
        assert gone.token_ids == expected
        running.flush_cache()
        assert running.stats().window_pages_cached == 0
        running.check_integrity()


async def test_the_next_turn_of_a_chat_finds_the_last_answer(subject: Subject) -> None:
    folder, _ = subject
    chat = list(MANY.shared)
    known = found = previous = 0
    async with engine(folder) as running, engine(folder, prefix_cache=False) as plain:
        for turn in range(4):
            answer = await running.complete(chat, max_tokens=30, **GREEDY)
            assert answer.token_ids == (await plain.complete(chat, max_tokens=30, **GREEDY)).token_ids
            if turn:
                found += answer.usage.cached_tokens
                known += previous
            previous = len(chat) + len(answer.token_ids)
            chat += [*answer.token_ids, *MANY.ids(30)]
        running.check_integrity()
    assert found / known >= 0.95


async def test_choices_fork_with_the_window(subject: Subject) -> None:
    folder, expected = subject
    async with engine(folder, max_num_seqs=5) as running:
        answers = await asyncio.gather(
            *(running.complete(MANY.prompts[i], n=4, max_tokens=MANY.lengths[i], **GREEDY) for i in range(6))
        )
        for answer, ids in zip(answers, expected):
            assert [choice.token_ids for choice in answer.choices] == [ids] * 4
        running.check_integrity()


async def test_pages_stay_together_where_they_go_to_host_memory(subject: Subject) -> None:
    folder, expected = subject
    async with engine(folder, host_cache_gib=0.01) as running:
        assert running.stats().window_pages == 0
        assert await MANY.complete(running) == expected
