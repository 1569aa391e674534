"""Weights of each family are reloaded in place.

This includes weights that loading transforms: norms that add 1, interleaved gate rows, transposed experts.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import aengine
from aengine.model.loading.hub import DEMO
from tests.engine.checkpoints import other_numbers
from tests.engine.conftest import idle
from tests.model.cases import CASES
from tests.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.anyio

ALWAYS = ("qwen3-5-wrapped", "gpt-oss", "gemma3")  # the others are slow tests
PROMPTS = [[300 + (place * 7 + length) % 3000 for place in range(length)] for length in (5, 70, 150)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow) for case in CASES],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints with one configuration."""
    folder = tmp_path_factory.mktemp(request.param)
    first = folder / "first"
    write_checkpoint(request.param, first, vocab_size=4096)  # of the demo model's tokenizer
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, first)
    return first, other_numbers(first, folder / "other")


def engine(folder: Path, **knobs: Any) -> aengine.Engine:
    return aengine.Engine(str(folder), device="cpu", progress=False, max_num_seqs=4, kv_cache_gib=0.05, **knobs)


async def answers(one: aengine.Engine) -> tuple[list[tuple[int, ...]], list[list[float]]]:
    completions = await asyncio.gather(*(one.complete(prompt, **GREEDY) for prompt in PROMPTS))
    embeddings = await one.embed(PROMPTS)
    return [completion.token_ids for completion in completions], [list(vector) for vector in embeddings.vectors]


@pytest.mark.slow
async def test_the_answers_are_those_of_the_other_checkpoint_and_then_its_own(pair: tuple[Path, Path]) -> None:
    first, other = pair
    async with engine(other) as one:
        ids, vectors = await answers(one)
    async with engine(first, sleep_mode=True) as one:
        own_ids, own_vectors = await answers(one)
        assert own_ids != ids
        await one.reload(other)
        for _ in range(2):  # the second time from the cache
            again, close = await answers(one)
            assert again == ids
            assert close == [pytest.approx(vector, abs=1e-4) for vector in vectors]
        await one.sleep()
        await one.wake_up()
        assert (await answers(one))[0] == ids
        await one.reload()
        back, close = await answers(one)
        assert back == own_ids
        assert close == [pytest.approx(vector, abs=1e-4) for vector in own_vectors]
        await idle(one)
