"""Every family over several ranks gives transformers' ids (float32), with preemption, cache hits and aborts."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import aengine
from aengine.model.loading.hub import DEMO
from tests.model.cases import CASES
from tests.model.checkpoints import Reference, reference, write_checkpoint
from tests.model.test_shards import sizes_of

pytestmark = pytest.mark.anyio

VOCAB = 4096  # of the demo model's tokenizer
ALWAYS = ("gpt-oss",)  # the others are slow tests
SEVERAL_RANKS = ("gpt-oss", "deepseek-v3", "qwen3-5")  # window pages, latents and states
EIGHT = ("qwen3-moe",)  # runs with 8 ranks, which is slow; the others run with 2 or 4, in turns
# These differ from another case in what ranks do not divide: names, rotations, or which layers have a window.
LIKE_ANOTHER = (
    *("qwen3-yarn", "llama3", "llama-linear", "qwen2-window-upper-layer", "mistral-window", "phi3-window"),
    *("qwen2-moe-some-layers", "qwen3-next-some-layers", "qwen3-5-tied", "qwen3-5-wrapped", "qwen3-5-wrapped-tied"),
    *("qwen3-5-moe-wrapped", "smollm3-window", "mistral3", "gemma3-that-sees", "gemma4-that-sees", "gemma4-unified"),
    *("deepseek-v3-no-query-rank", "glm4-moe-qk-norm-groups", "qwen3-vl-moe", "glm4v", "kimi-k2-5", "llama4-wrapped"),
    *("qwen2-5-vl", "qwen3-5-linear-last", "qwen3-moe-first-dense", "deepseek-v2-lite", "exaone4-no-window"),
)
PREEMPTING = {"num_pages": 48, "page_size": 3, "window_context": 20, "max_model_len": 128}


def cases() -> list[Any]:
    """Families with 2, 4 or 8 ranks, some with 2 and 8."""
    turns = itertools.cycle([2, 4])
    counts = {
        case: (2, 8) if case in SEVERAL_RANKS else (8 if case in EIGHT else next(turns),)
        for case in CASES
        if case not in LIKE_ANOTHER
    }
    pairs = [(case, ranks) for case, each in counts.items() for ranks in each]
    return [
        pytest.param(case, ranks, marks=() if case in ALWAYS and ranks == 2 else pytest.mark.slow, id=f"{case}-{ranks}")
        for case, ranks in pairs
    ]


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A folder, and the ids of transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, folder, **{**sizes_of(request.param), "vocab_size": VOCAB})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder, reference(model, vocab=VOCAB, per_length=3, least=6, new_tokens=20)


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "ranks"), cases(), indirect=["subject"])
async def test_the_ids_are_those_of_transformers(ranks: int, subject: tuple[Path, Reference]) -> None:
    folder, expected = subject
    chance = random.Random(ranks)
    greedy = {"temperature": 0, "max_tokens": len(expected.ids[0]), "ignore_eos": True}
    knobs = {"max_num_seqs": 24, "torch_threads": 1, "progress": False, **PREEMPTING}

    async def given_up(engine: aengine.Engine, prompt: list[int], after: int) -> None:
        async for _ in engine.generate(prompt, **greedy):
            after -= 1
            if after < 0:
                break

    async with aengine.Engine(str(folder), device="cpu", tensor_parallel_size=ranks, **knobs) as engine:
        others = [given_up(engine, prompt[::-1], chance.randint(0, 15)) for prompt in expected.prompts]
        wanted = [engine.complete(prompt, **greedy) for prompt in expected.prompts]
        both = [work for pair in zip(others, wanted, strict=True) for work in pair]
        assert [list(one.token_ids) for one in (await asyncio.gather(*both))[1::2]] == expected.ids
        stats = engine.stats()
        assert stats.preemptions > 0 or stats.pages_total != PREEMPTING["num_pages"] - 1  # all layers have a window
        again = await engine.complete(expected.prompts[-1], n=3, **greedy)
        assert [list(choice.token_ids) for choice in again.choices] == [expected.ids[-1]] * 3
        engine.check_integrity()
