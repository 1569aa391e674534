"""Pooled prompts with adapters equal PEFT's merged weights (float32), in batches with other adapters and none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import aengine
from aengine.errors import AengineError, InvalidRequestError, ModelNotFoundError
from aengine.runtime.adapters import AdapterPlaces
from tests.engine.conftest import idle
from tests.engine.pooling.checkpoints import hidden_states, logits, write, write_modules
from tests.engine.pooling.test_embeddings import CLOSE, PROMPTS, last, matrix, mean, running, unit
from tests.engine.pooling.test_scores import DOCUMENTS, QUERY, card_prompt, close
from tests.model.lora.adapters import write_adapter

pytestmark = pytest.mark.anyio

FEATURES = {"task_type": "FEATURE_EXTRACTION"}


@asynccontextmanager
async def adapted(folder: Path, *names: str, **knobs: Any) -> AsyncIterator[aengine.Engine]:
    """An engine with the adapters in its model's folder."""
    async with running(folder / "base", lora={name: str(folder / name) for name in names}, **knobs) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize(("family", "head"), [("qwen3", "none"), ("llama", "vocabulary")])
async def test_vectors_of_the_base_and_of_two_adapters_together(tmp_path: Path, family: str, head: str) -> None:
    base = write(tmp_path / "base", family, head)
    task = FEATURES if head == "none" else {"task_type": "CAUSAL_LM"}
    models = {
        None: base,
        **{name: write_adapter(base, tmp_path / name, seed, **task) for seed, name in enumerate("ab")},
    }
    async with adapted(tmp_path, "a", "b") as engine:
        for _ in range(2):  # the second time from the cache, with separate prefixes for each adapter
            found = await asyncio.gather(*(engine.embed(PROMPTS, adapter=name) for name in models))
            for embeddings, model in zip(found, models.values(), strict=True):
                assert np.allclose(matrix(embeddings), unit(last(model)), **CLOSE)
        assert all(embeddings.usage.cached_tokens for embeddings in found)
        assert not np.allclose(matrix(found[0]), matrix(found[1]), atol=1e-2)


async def test_means_over_prompts_that_are_cut(tmp_path: Path) -> None:
    base = write(tmp_path / "base", "qwen2", "none")
    write_modules(tmp_path / "base", "Pooling", pooling_mode_mean_tokens=True)
    merged = write_adapter(base, tmp_path / "a", **FEATURES)
    async with adapted(tmp_path, "a", max_step_tokens=24) as engine:
        plain, own = await asyncio.gather(engine.embed(PROMPTS), engine.embed(PROMPTS, adapter="a"))
    assert np.allclose(matrix(plain), mean(base), **CLOSE)
    assert np.allclose(matrix(own), mean(merged), **CLOSE)


def yes(model: PreTrainedModel, folder: Path, engine: aengine.Engine, document: str) -> float:
    """Return P(yes) as the model card of Qwen3-Reranker computes it."""
    no_yes = logits(model, card_prompt(folder, QUERY, document))[-1][
        [engine.tokenizer.encode_now(word)[0] for word in ("no", "yes")]
    ]
    return float(torch.log_softmax(no_yes, dim=0)[1].exp())


async def test_scores_of_a_reranker_whose_output_matrix_is_adapted(tmp_path: Path) -> None:
    base = write(tmp_path / "base", "qwen3", "vocabulary", initializer_range=0.1)
    merged = write_adapter(base, tmp_path / "a", target_modules=["lm_head", "q_proj"])
    async with adapted(tmp_path, "a", rerank_template="qwen3") as engine:
        plain, own = await asyncio.gather(engine.score(QUERY, DOCUMENTS), engine.score(QUERY, DOCUMENTS, adapter="a"))
        for scores, model in ((plain, base), (own, merged)):
            expected = [yes(model, tmp_path / "base", engine, document) for document in DOCUMENTS]
            assert list(scores.values) == [close(one) for one in expected]
        ranking = await engine.rerank(QUERY, DOCUMENTS, adapter="a")
    assert [one.score for one in ranking.results] == [close(one) for one in sorted(own.values, reverse=True)]


async def test_classes(tmp_path: Path) -> None:
    base = write(tmp_path / "base", "qwen3", "classes", num_labels=3)
    merged = write_adapter(base, tmp_path / "a")
    async with adapted(tmp_path, "a") as engine:
        found = await engine.classify(PROMPTS, adapter="a")
    expected = torch.stack([logits(merged, ids) for ids in PROMPTS]).softmax(-1)
    assert [list(one.probabilities) for one in found.results] == [close(row) for row in expected.tolist()]


async def test_more_adapters_than_places_and_unknown_names(tmp_path: Path) -> None:
    base = write(tmp_path / "base")
    models = {name: write_adapter(base, tmp_path / name, seed, **FEATURES) for seed, name in enumerate("abcd")}
    async with adapted(tmp_path, *models, max_loras=1) as engine:
        found = await asyncio.gather(*(engine.embed(PROMPTS[3], adapter=name) for name in models))
        for embeddings, model in zip(found, models.values(), strict=True):
            assert np.allclose(matrix(embeddings)[0], unit(hidden_states(model, PROMPTS[3])[-1]), **CLOSE)
        with pytest.raises(ModelNotFoundError, match="'e' is not loaded"):
            await engine.embed(PROMPTS[3], adapter="e")
        with pytest.raises(InvalidRequestError, match="adapter must be text"):
            await engine.embed(PROMPTS[3], adapter=5)


async def test_an_adapter_that_cannot_be_brought_in_fails_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write(tmp_path / "base")
    for seed, name in enumerate("ab"):
        write_adapter(base, tmp_path / name, seed, **FEATURES)
    async with adapted(tmp_path, "a", "b", max_loras=1) as engine:
        await engine.embed(PROMPTS[3], adapter="a")

        def broken(*_: object) -> None:
            raise RuntimeError("no copy")

        monkeypatch.setattr(AdapterPlaces, "fill", broken)
        with pytest.raises(AengineError, match="could not be copied to the device"):
            await engine.embed(PROMPTS[3], adapter="b")
        await idle(engine)
