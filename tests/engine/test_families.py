"""For each family, the engine with all its optimisations gives the ids of transformers (float32)."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

import aengine
from aengine.model.loading.hub import DEMO
from tests.model.cases import CASES
from tests.model.checkpoints import Reference, reference, write_checkpoint

pytestmark = pytest.mark.anyio

VOCAB = 4096  # of the demo model's tokenizer
ALWAYS = ("gpt-oss",)  # the others are slow tests
PREEMPTING = "small pool, preempting"
VARIANTS: dict[str, dict[str, object]] = {
    "lookahead": {},
    PREEMPTING: {"num_pages": 60, "page_size": 3, "window_context": 20},  # few window pages, too
    "chunks of 7, no lookahead": {"max_step_tokens": 16, "max_num_seqs": 9, "lookahead": False},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow) for case in CASES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, folder, vocab_size=VOCAB)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder, reference(model, vocab=VOCAB, per_length=5, least=8, new_tokens=24)


@pytest.mark.slow
@pytest.mark.turns("name")
@pytest.mark.parametrize("name", VARIANTS)
async def test_the_ids_are_those_of_transformers(name: str, subject: tuple[Path, Reference]) -> None:
    """The variants take turns: one for each family."""
    folder, expected = subject
    knobs = {"max_num_seqs": 32, "kv_cache_gib": 0.1, "max_model_len": 128, **VARIANTS[name]}
    greedy = {"temperature": 0, "max_tokens": len(expected.ids[0]), "ignore_eos": True}
    async with aengine.Engine(str(folder), device="cpu", progress=False, **knobs) as engine:
        completions = await asyncio.gather(*(engine.complete(prompt, **greedy) for prompt in expected.prompts))
        assert [list(one.token_ids) for one in completions] == expected.ids
        assert (name == PREEMPTING) == (engine.stats().preemptions > 0)
        prompt, ids = expected.prompts[-1], expected.ids[-1]  # one of the longest
        await engine.complete(prompt, **greedy)
        again = await engine.complete(prompt, n=3, **greedy)
        assert [list(choice.token_ids) for choice in again.choices] == [ids] * 3
        # A prompt of 49 tokens ends before the first snapshot of a state.
        assert (again.usage.cached_tokens > 0) == (engine._ready().runtime.pool.states is None)
        engine.check_integrity()
