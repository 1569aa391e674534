"""Models with linear and full attention give the same ids, however states are kept, copied and resumed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aengine
from tests.engine.many_prompts import GREEDY, ManyPrompts

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MANY = ManyPrompts(seed=7, longest=48)
# With pages of 5 tokens, a state is kept after every 320th token, where a page and a block of 64 end together.
MANY.prompts += [MANY.shared + MANY.ids(length) for length in (121, 130)]
MANY.lengths += [20, 30]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """A checkpoint, and the ids of transformers for each prompt."""
    folder = tmp_path_factory.mktemp("hybrid")
    return folder, MANY.write("demo-hybrid", folder)


@pytest.fixture(scope="module")
def convolving(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """The same for a model whose states are those of short convolutions."""
    folder = tmp_path_factory.mktemp("convolving")
    return folder, MANY.write("lfm2", folder, vocab_size=4096, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def selective(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """The same for a model with Mamba2."""
    folder = tmp_path_factory.mktemp("selective")
    return folder, MANY.write("granite4-hybrid", folder, vocab_size=4096, max_position_embeddings=4096)


def engine(folder: Path, **knobs: object) -> aengine.Engine:
    return aengine.Engine(model=str(folder), device="cpu", **{"max_num_seqs": 20, "kv_cache_gib": 0.02, **knobs})


VARIANTS: dict[str, dict[str, object]] = {
    "as it comes": {},
    "no prefix cache": {"prefix_cache": False},
    "no lookahead": {"lookahead": False},
    "small pool, preempting": {"num_pages": 60, "page_size": 8, "max_model_len": 400},
    "small pool, three snapshots": {"num_pages": 60, "page_size": 8, "max_model_len": 400, "state_snapshots": 3},
    "chunks of 7": {"max_step_tokens": 7, "max_num_seqs": 7},
    "chunks of 33, no lookahead": {"max_step_tokens": 33, "lookahead": False},
    "one row": {"max_num_seqs": 1},
    "pages of 1": {"page_size": 1},
    "pages of 5": {"page_size": 5},
    "pages of 128": {"page_size": 128},
    "sparse snapshots": {"state_snapshot_tokens": 192},
    "no snapshots": {"state_snapshots": 0},
}


@pytest.mark.parametrize("name", VARIANTS)
async def test_ids_are_those_of_transformers(name: str, checkpoint: tuple[Path, list[tuple[int, ...]]]) -> None:
    await run_twice(name, *checkpoint)


@pytest.mark.parametrize("name", ["small pool, three snapshots", "chunks of 33, no lookahead", "pages of 5"])
async def test_short_convolutions_keep_states_too(name: str, convolving: tuple[Path, list[tuple[int, ...]]]) -> None:
    await run_twice(name, *convolving)


@pytest.mark.parametrize("name", VARIANTS)
async def test_mamba2_keeps_states_too(name: str, selective: tuple[Path, list[tuple[int, ...]]]) -> None:
    await run_twice(name, *selective)


async def run_twice(name: str, folder: Path, expected: list[tuple[int, ...]]) -> None:
    """Run all prompts twice, the second time from the cache if there are snapshots."""
    async with engine(folder, **VARIANTS[name]) as running:
        assert await MANY.complete(running) == expected
        before = running.stats()
        assert await MANY.complete(running) == expected
        after = running.stats()
    hits = after.cached_tokens - before.cached_tokens
    assert (hits > 0) == (after.state_snapshots > 0)
    if name == "as it comes":
        assert hits / (after.prompt_tokens - before.prompt_tokens) > 0.6  # prompts of 1 to 330 tokens, in steps of 64
    if "small pool" in name:
        assert after.preemptions > 0


async def test_a_prompt_continues_from_its_last_snapshot(checkpoint: tuple[Path, list[tuple[int, ...]]]) -> None:
    """With 64 tokens a step, 128 of 150 known tokens are found again, and shared by forks."""
    folder, _ = checkpoint
    prompt = MANY.shared[:150]
    async with engine(folder) as running:
        first = await running.complete(prompt, max_tokens=4, **GREEDY)
        again = await running.complete(prompt, max_tokens=4, **GREEDY)
        assert again.token_ids == first.token_ids
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 128)
        longer = await running.complete([*prompt, 301], max_tokens=1, **GREEDY)
        assert longer.usage.cached_tokens == 128
        running.flush_cache()
        assert running.stats().state_snapshots_used == 0
        assert (await running.complete(prompt, max_tokens=1, **GREEDY)).usage.cached_tokens == 0
        running.check_integrity()


async def test_what_prompts_share_is_found(checkpoint: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, _ = checkpoint
    async with engine(folder, kv_cache_gib=0.05) as running:
        found = [
            (await running.complete(MANY.shared + [400 + i] * 300, max_tokens=1, **GREEDY)).usage.cached_tokens
            for i in range(3)
        ]
        assert found == [0, 192, 192]
    async with engine(folder, state_snapshot_tokens=512) as sparse:
        for i in range(2):  # their common prefix ends before the first snapshot
            answer = await sparse.complete(MANY.shared + [400 + i] * 300, max_tokens=1, **GREEDY)
            assert answer.usage.cached_tokens == 0


async def test_the_next_turn_of_a_chat_finds_the_last_answer(checkpoint: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, _ = checkpoint
    chat = list(MANY.shared)
    known = found = previous = 0
    async with engine(folder) as running, engine(folder, prefix_cache=False) as plain:
        for turn in range(8):
            answer = await running.complete(chat, max_tokens=150, **GREEDY)
            if turn in (1, 7):
                assert answer.token_ids == (await plain.complete(chat, max_tokens=150, **GREEDY)).token_ids
            if turn:
                found += answer.usage.cached_tokens
                known += previous
            previous = len(chat) + len(answer.token_ids)
            chat += [*answer.token_ids, *MANY.ids(70)]
        running.check_integrity()
        assert running.stats().state_snapshots_used > 0
    assert found / known >= 0.95


async def test_choices_fork_with_the_state(checkpoint: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, expected = checkpoint
    async with engine(folder, max_num_seqs=5) as running:
        answers = await asyncio.gather(
            *(running.complete(MANY.prompts[i], n=4, max_tokens=MANY.lengths[i], **GREEDY) for i in range(6))
        )
        for answer, ids in zip(answers, expected):
            assert [choice.token_ids for choice in answer.choices] == [ids] * 4
        running.check_integrity()


async def test_states_in_bfloat16_are_close(checkpoint: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, _ = checkpoint
    async with engine(folder) as wide, engine(folder, state_dtype="bfloat16") as narrow:
        for prompt in MANY.prompts[:4]:
            a, b = [(await one.complete(prompt, max_tokens=2, logprobs=5, **GREEDY)) for one in (wide, narrow)]
            expected, got = (
                answer.choices[0].logprobs[1].logprob for answer in (a, b)
            )  # the first request found nothing
            assert got == pytest.approx(expected, abs=0.05)
            assert got != expected


async def test_a_grain_that_pages_do_not_have_is_refused(checkpoint: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, _ = checkpoint
    with pytest.raises(aengine.ConfigError, match="state_snapshot_tokens: 96 must be a multiple of 64"):
        async with engine(folder, state_snapshot_tokens=96):
            pass
