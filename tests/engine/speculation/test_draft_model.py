"""A smaller model that drafts: it changes no id, and if it is the target itself, all drafts are right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import aengine
from aengine.errors import AengineError
from aengine.model.config import ModelConfig
from aengine.model.drafting.draft_config import read_draft_model
from aengine.types import Stats
from tests.engine.conftest import idle
from tests.engine.speculation.test_heads import GREEDY, KNOBS, PROMPTS, SEEDED, VOCAB, answers, with_tokenizer
from tests.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.anyio

SLOW = pytest.mark.slow


class Models(NamedTuple):
    target: Path
    draft: Path
    indivisible: Path  # by two ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint("llama2", folder / "target", vocab_size=VOCAB, tie_word_embeddings=False)
    write_checkpoint("qwen3", folder / "draft", vocab_size=VOCAB, num_hidden_layers=1)
    whole = {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    write_checkpoint("llama2", folder / "indivisible", vocab_size=VOCAB, **whole)
    with_tokenizer(folder / "target")
    return Models(*(folder / name for name in Models._fields))


@pytest.fixture(scope="module")
def plain(models: Models) -> list[list[int]]:
    return asyncio.run(answers(models.target, "off"))[0]


@pytest.mark.parametrize(
    ("draft", "knobs"),
    [
        ("draft", {}),
        pytest.param("draft", {"draft_tokens": 16}, marks=SLOW),
        pytest.param("target", {"num_pages": 66}, marks=SLOW),  # requests are preempted
        pytest.param("target", {"tensor_parallel_size": 2}, marks=SLOW),
        pytest.param("indivisible", {"tensor_parallel_size": 2}, marks=SLOW),
        pytest.param("target", {"lookahead": False}, marks=SLOW),
        pytest.param("target", {"kv_cache_dtype": "fp8"}, marks=SLOW),
    ],
)
async def test_it_changes_no_id(models: Models, plain: list[list[int]], draft: str, knobs: dict[str, object]) -> None:
    if "kv_cache_dtype" in knobs:
        plain = (await answers(models.target, "off", **knobs))[0]
    drafted, _, proposer = await answers(models.target, f"draft={getattr(models, draft)}", **knobs)
    assert drafted == plain
    assert proposer == "draft"


def rate(before: Stats, after: Stats) -> float:
    return (after.accepted_tokens - before.accepted_tokens) / (after.drafted_tokens - before.drafted_tokens)


async def test_the_target_itself_drafts_only_right_tokens(models: Models) -> None:
    """Also after hits of the prefix cache, whose pages hold the keys and values of both, and for siblings."""
    knobs = {**KNOBS, "max_num_seqs": 4, "max_step_tokens": 16}  # prompts are computed in chunks
    async with aengine.Engine(str(models.target), speculation=f"draft={models.target}", **knobs) as engine:
        for params in (GREEDY, SEEDED):
            history = PROMPTS[3]
            for turn in range(3):
                before = engine.stats()
                answer = await engine.complete(history, max_tokens=30, ignore_eos=True, **params)
                assert rate(before, engine.stats()) == 1.0
                assert turn == 0 or answer.usage.cached_tokens > 0.8 * len(history) - 4
                history = [*history, *answer.token_ids, 7 + turn]
        before = engine.stats()
        await engine.complete(PROMPTS[2], n=3, max_tokens=30, ignore_eos=True, **SEEDED)
        # Tokens for which a row has no page yet share page 0, so rows may disturb each other there.
        assert rate(before, engine.stats()) > 0.7
        await idle(engine)


def test_other_processes_read_it(models: Models) -> None:
    model = ModelConfig.from_folder(models.target)
    model = model.with_head(read_draft_model(models.draft, model))
    assert msgspec.json.decode(msgspec.json.encode(model), type=ModelConfig) == model


async def test_a_draft_model_that_does_not_fit(models: Models, tmp_path: Path) -> None:
    write_checkpoint("llama2", tmp_path / "other", vocab_size=96)
    write_checkpoint("mistral", tmp_path / "sliding", vocab_size=VOCAB, sliding_window=8)
    for name, error in (
        ("other", f"vocab_size is 96, that of the model {VOCAB}; use a draft model with the same vocabulary"),
        ("sliding", "MistralForCausalLM has sliding windows, which is not supported in draft models"),
        ("nowhere", "nowhere"),
    ):
        with pytest.raises(AengineError, match=error):
            await answers(models.target, f"draft={tmp_path / name}")
