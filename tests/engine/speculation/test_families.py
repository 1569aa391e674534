"""Families of models answer as without speculation: windows with their own pages, sinks, experts, latents, longrope.

Each family answers twice, the second time from the prefix cache, which finds as much as without speculation.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import aengine
from aengine.model.loading.hub import DEMO
from aengine.types import Completion
from tests.engine.conftest import idle
from tests.engine.speculation.answers import KNOBS, Request, answers, assert_same, book_of, speculating
from tests.engine.speculation.replay import Drafts
from tests.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.anyio

QUICK = ("gpt-oss",)
CASES = (
    "gpt-oss",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-small",
    "gemma3n",
    "mistral-window",
    "olmo3",
    "qwen2-window-upper-layer",
    "qwen3-moe",
    "mixtral",
    "glm4-moe",
    "deepseek-v3",
    "deepseek-v2-lite",
    "granite",
    "phi3-beyond-the-trained-context",
    "ministral3",
    "muse-glimmer",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "small pool, preempting": {"num_pages": 60, "page_size": 3, "window_context": 20},  # few window pages, too
    "pages of 1": {"page_size": 1},
    "small steps, no lookahead": {"max_step_tokens": 16, "max_num_seqs": 9, "lookahead": False},
}
RNG = random.Random(5)
SHARED = [RNG.randrange(300, 4000) for _ in range(40)]


def requests(count: int) -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0, "n": 2, "frequency_penalty": 0.5},
    ]
    return [
        (
            (SHARED if at % 2 else []) + [RNG.randrange(300, 4000) for _ in range(RNG.randint(1, 50))],
            {"max_tokens": RNG.randint(8, 30), "ignore_eos": True, **kinds[at % len(kinds)]},
        )
        for at in range(count)
    ]


REQUESTS = requests(9)


@pytest.fixture(
    scope="module",
    params=[case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(request.param, tmp_path_factory.mktemp(request.param))


def write_family(case: str, folder: Path) -> Path:
    """Write a checkpoint with random weights and the demo model's tokenizer. Returns the folder."""
    sizes = {"original_max_position_embeddings": 64} if "phi3" in case else {}
    write_checkpoint(case, folder, vocab_size=4096, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


async def twice(engine: aengine.Engine) -> list[Completion]:
    """Answer all requests together, and then one after the other."""
    together = await answers(engine, REQUESTS)
    alone = [await engine.complete(prompt, **params) for prompt, params in REQUESTS]
    await idle(engine)
    return together + alone


def hits(completions: Sequence[Completion]) -> list[int]:
    return [one.usage.cached_tokens for one in completions]


@pytest.mark.turns("name")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if at > 1 else ()) for at, name in enumerate(VARIANTS)]
)
async def test_answers_are_those_without_speculation(name: str, checkpoint: Path) -> None:
    """The variants take turns: one for each family that is slow."""
    knobs = KNOBS | {"model": str(checkpoint), "max_model_len": 128} | VARIANTS[name]
    async with aengine.Engine(**knobs) as plain:
        expected = await twice(plain)
    drafts = Drafts(book_of(REQUESTS * 2, expected), right=0.8)
    async with speculating(drafts, **knobs) as engine:
        found = await twice(engine)
        preempted = engine.stats().preemptions > 0
    assert_same(found, expected, REQUESTS * 2)
    assert drafts.accepted > 0.3 * drafts.verified  # fewer than are right: an output's last drafts come too late
    if "preempting" in name:
        assert preempted != checkpoint.name.startswith("mistral-window")  # all its layers have a window
    else:
        assert hits(found[len(REQUESTS) :]) == hits(expected[len(REQUESTS) :])
