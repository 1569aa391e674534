"""Llama 4: settings that its cases do not vary, names and flags of published files, and what is refused."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch

import aengine
from aengine.errors import CheckpointError, ConfigError, UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import DEMO
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.feed_forward import ExpertsSpec
from tests.engine.checkpoints import with_config
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import assert_mixed, load


def attention(config: ModelConfig) -> list[AttentionSpec]:
    return [one for one in config.attending if isinstance(one, AttentionSpec)]


def test_flags_as_published(tmp_path: Path) -> None:
    """A number says that queries grow, and an empty list that every fourth layer does not rotate."""
    model = write_checkpoint("llama4", tmp_path)
    with_config(tmp_path, attn_temperature_tuning=4, no_rope_layers=[], layer_types=None, moe_layers=None)
    config = ModelConfig.from_folder(tmp_path)
    assert [one.rope is None for one in attention(config)] == [False, False, False, True]
    assert [one.growth is None for one in attention(config)] == [True, True, True, False]
    assert [one.window for one in attention(config)] == [48, 48, 48, None]
    assert [isinstance(layer.ffn, ExpertsSpec) for layer in config.layers] == [False, True, False, True]
    assert_mixed(load(tmp_path, ()), [model])


def test_other_layers_with_experts_and_with_chunks_and_no_growth(tmp_path: Path) -> None:
    types = ["full_attention", "chunked_attention", "full_attention", "chunked_attention"]
    settings = {"moe_layers": [0, 3], "layer_types": types, "attn_temperature_tuning": False, "attention_bias": True}
    model = write_checkpoint("llama4", tmp_path, **settings)
    config = ModelConfig.from_folder(tmp_path)
    assert [one.window for one in attention(config)] == [None, 48, None, 48]
    assert_mixed(load(tmp_path, ()), [model])


def test_no_chunks(tmp_path: Path) -> None:
    model = write_checkpoint("llama4", tmp_path, attention_chunk_size=None)
    assert ModelConfig.from_folder(tmp_path).windows == [None] * 4
    assert_mixed(load(tmp_path, ()), [model])


@pytest.mark.anyio
async def test_contexts_of_many_chunks(tmp_path: Path) -> None:
    """A step of a prompt has several chunks. Pages outside of chunks are freed, and sequences are preempted."""
    model = write_checkpoint("llama4", tmp_path, vocab_size=4096, attention_chunk_size=16, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 4096, (6, 150), generator=generator)
    greedy = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **greedy)[:, 150:].tolist()
    knobs = {"device": "cpu", "progress": False, "num_pages": 90, "page_size": 8, "window_context": 32}
    async with aengine.Engine(str(tmp_path), max_model_len=200, max_step_tokens=70, max_num_seqs=8, **knobs) as engine:
        wanted = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        for _ in range(2):  # the second time from the cache
            done = await asyncio.gather(*(engine.complete(prompt, **wanted) for prompt in prompts.tolist()))
            assert [list(one.token_ids) for one in done] == expected
        assert engine.stats().preemptions > 0
        engine.check_integrity()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok 2"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"attention_chunk_size": None}, "attention_chunk_size"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_what_is_refused(settings: dict[str, object], named: str, tmp_path: Path) -> None:
    write_checkpoint("llama4", tmp_path)
    with_config(tmp_path, **settings)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=named):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"page_size": 5}, r"^page_size: 5 does not divide the chunks of 48 tokens"),
        ({"speculation": "ngram"}, r"^speculation: layers that attend within chunks of 48 tokens take no drafts"),
    ],
)
async def test_settings_that_chunks_do_not_take(knobs: dict[str, object], named: str, tmp_path: Path) -> None:
    """Contexts within one chunk take them."""
    write_checkpoint("llama4", tmp_path, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    shared = {"device": "cpu", "progress": False, "kv_cache_gib": 0.1, **knobs}
    with pytest.raises(ConfigError, match=named):
        async with aengine.Engine(str(tmp_path), max_model_len=49, **shared):
            pass
    async with aengine.Engine(str(tmp_path), max_model_len=48, **shared) as engine:
        done = await engine.complete([5, 6, 7] * 10, max_tokens=18, temperature=0, ignore_eos=True)
        assert len(done.token_ids) == 18
