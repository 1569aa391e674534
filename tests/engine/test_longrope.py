"""Requests that never leave the trained context are rotated as in transformers, next to others that may leave it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

import aengine
from aengine.model.loading.hub import DEMO
from tests.model.checkpoints import NEW_TOKENS, Reference, reference, write_checkpoint

pytestmark = pytest.mark.anyio

VOCAB, CONTEXT = 4096, 96
VARIANTS: dict[str, dict[str, object]] = {
    "lookahead": {},
    "small pool, preempting": {"num_pages": 60, "page_size": 3},
    "chunks of 7, no lookahead": {"max_step_tokens": 16, "max_num_seqs": 9, "lookahead": False},
    "a GPU": {"device": "cuda"},
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference, Reference]:
    """A model, and the ids of transformers inside the trained context, and beyond it from the first token on."""
    found = []
    for name, sizes in (("near", {"original_max_position_embeddings": CONTEXT}), ("far", {})):
        folder = tmp_path_factory.mktemp(name)
        # One after the other, because configurations of transformers change the dicts that they are made from.
        model = write_checkpoint("phi3-beyond-the-trained-context", folder, vocab_size=VOCAB, **sizes)
        found.append((folder, reference(model, vocab=VOCAB, least=8)))
    [(folder, near), (_, far)] = found
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    assert near.ids != far.ids
    return folder, near, far


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.gpu if "GPU" in name else pytest.mark.slow if at else ())
        for at, name in enumerate(VARIANTS)
    ],
)
async def test_both_are_rotated_in_their_own_ways(name: str, subject: tuple[Path, Reference, Reference]) -> None:
    folder, near, far = subject
    knobs = {"device": "cpu", "dtype": "float32", "max_num_seqs": 64, "kv_cache_gib": 0.1, "max_model_len": 128}
    async with aengine.Engine(str(folder), progress=False, **knobs | VARIANTS[name]) as engine:

        async def complete(prompt: list[int], most: int) -> list[int]:
            one = await engine.complete(prompt, max_tokens=most - len(prompt), temperature=0, ignore_eos=True)
            return list(one.token_ids)[:NEW_TOKENS]

        answers = await asyncio.gather(
            *(complete(prompt, CONTEXT) for prompt in near.prompts),
            *(complete(prompt, CONTEXT + 1) for prompt in far.prompts),
        )
        assert answers == near.ids + far.ids
        assert (name == "small pool, preempting") == (engine.stats().preemptions > 0)
        engine.check_integrity()


async def test_both_have_as_many_tokens_as_they_must(subject: tuple[Path, Reference, Reference]) -> None:
    folder, near, far = subject
    async with aengine.Engine(
        str(folder), device="cpu", dtype="float32", progress=False, kv_cache_gib=0.1, max_model_len=128
    ) as engine:
        for expected, most in ((near, CONTEXT), (far, CONTEXT + 1)):
            prompt, [first, *_] = expected.prompts[0], expected.ids[0]
            one = await engine.complete(
                prompt, max_tokens=most - len(prompt), temperature=0, min_tokens=3, stop_token_ids=[first]
            )
            assert len(one.token_ids) >= 3
            assert first not in one.token_ids[:3]


async def test_they_share_no_cached_prefix(subject: tuple[Path, Reference, Reference]) -> None:
    folder, near, _ = subject
    prompt = near.prompts[-1]
    async with aengine.Engine(
        str(folder), device="cpu", progress=False, kv_cache_gib=0.1, max_model_len=128, page_size=4
    ) as engine:
        cached = []
        for most in (1, 60, 60, 2, None):  # without a bound it may leave the context
            one = await engine.complete(prompt, max_tokens=most, temperature=0, n=2)
            cached.append(one.usage.cached_tokens)
    assert len(prompt) == 49
    assert cached == [0, 0, 48, 48, 48]
