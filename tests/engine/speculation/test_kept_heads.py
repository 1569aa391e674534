"""Proposers after sleep and after a reload of weights: they draft as in an engine that has just started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

import aengine
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.startup.start import start_runtime
from tests.engine.checkpoints import other_numbers
from tests.engine.speculation.test_heads import KNOBS, PROMPTS, VOCAB, with_tokenizer
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import make_tensors, write_head
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint

pytestmark = pytest.mark.anyio

HEAD = HeadSettings(target_vocab=VOCAB, draft_vocab=VOCAB, taps=(0, 1, 2), own_head=False)


class Models(NamedTuple):
    first: Path
    second: Path  # the same model with other weights
    head: Path


class Drafting(NamedTuple):
    """Answers, and how many drafts were verified and accepted."""

    ids: list[tuple[int, ...]]
    drafted: int
    accepted: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("kept")
    write_mtp_checkpoint("qwen3", folder / "first", vocab_size=VOCAB)
    first = with_tokenizer(folder / "first")
    head = write_head(HEAD, folder / "head")
    return Models(first, other_numbers(first, folder / "second"), head)


def engine_of(folder: Path, models: Models, kind: str, **knobs: object) -> aengine.Engine:
    speculation = {"eagle3": f"eagle3={models.head}", "draft": f"draft={models.first}"}.get(kind, kind)
    return aengine.Engine(str(folder), speculation=speculation, **{**KNOBS, "max_num_seqs": 4, **knobs})


async def drafting(engine: aengine.Engine) -> Drafting:
    before = engine.stats()
    ids = []
    for prompt in PROMPTS[::2]:  # one by one, so that every run has the same steps
        for params in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}):
            answer = await engine.complete(prompt + prompt, max_tokens=24, ignore_eos=True, **params)
            ids.append(tuple(answer.token_ids))
    after = engine.stats()
    return Drafting(ids, after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens)


async def fresh(folder: Path, models: Models, kind: str) -> Drafting:
    async with engine_of(folder, models, kind) as engine:
        return await drafting(engine)


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[Path, list[tuple[int, ...]]]:
    """The ids of both models without speculation."""
    return {folder: asyncio.run(fresh(folder, models, "off")).ids for folder in (models.first, models.second)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "eagle3", "draft", "ngram"])
async def test_a_proposer_drafts_as_before_after_sleep(
    models: Models, kind: str, plain: dict[Path, list[tuple[int, ...]]]
) -> None:
    async with engine_of(models.first, models, kind, sleep_mode=True) as engine:
        before = await drafting(engine)
        await engine.sleep()
        await engine.wake_up()
        assert await drafting(engine) == before
    assert before.drafted > 0
    assert before.ids == plain[models.first]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "eagle3", "draft", "ngram"])
async def test_an_mtp_layer_is_reloaded_with_the_model_and_other_weights_stay(
    models: Models, kind: str, plain: dict[Path, list[tuple[int, ...]]]
) -> None:
    async with engine_of(models.first, models, kind) as engine:
        before = await drafting(engine)
        await engine.reload(models.second)
        after = await drafting(engine)
    assert after == await fresh(models.second, models, kind)
    assert after.ids == plain[models.second] != before.ids


def test_the_digest_of_the_weights_tells_heads_apart_after_a_reload_as_well(models: Models, tmp_path: Path) -> None:
    """Pages on the disk hold the keys and values of a head, too."""
    other = write_head(HEAD, tmp_path / "other", make_tensors(HEAD, seed=1))
    found = []
    for head in (models.head, other):
        config = EngineConfig(
            **KNOBS, model=str(models.first), speculation=f"eagle3={head}", disk_cache_dir=str(tmp_path)
        )
        runtime = start_runtime(config, models.first, ModelConfig.from_folder(models.first))
        assert runtime.weights is not None
        found.append(runtime.weights.digest)
        runtime.weights.reload(runtime.weights.matching(models.second, ModelConfig.from_folder(models.second)))
        found.append(runtime.weights.digest)
        runtime.close()
    assert len(set(found)) == 4
