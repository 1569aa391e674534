"""Torch's kernels on a GPU: which knobs they refuse, and that ids are those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import aengine
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import DEMO
from aengine.runtime.startup.start_torch import start_torch
from tests.model.checkpoints import reference, write_checkpoint

VOCAB = 4096  # of the demo model's tokenizer


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("host_cache_gib", 1.0),
        ("sleep_mode", True),
        ("lora_loading", True),
        ("tensor_parallel_size", 2),
        ("speculation", "ngram"),
    ],
)
def test_a_knob_that_needs_our_kernels_is_named(knob: str, value: object) -> None:
    config = EngineConfig(**{"kernels": "torch", knob: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"^{knob}: on a GPU it needs kernels of our own"):
        start_torch(config, DEMO, ModelConfig.from_folder(DEMO), lambda: None, device=torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.anyio
@pytest.mark.parametrize("case", ["qwen3", "qwen3-5", "qwen3-moe"])
async def test_ids_on_a_gpu_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = write_checkpoint(case, tmp_path, vocab_size=VOCAB)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    expected = reference(model, vocab=VOCAB, least=8)
    knobs: dict[str, Any] = {"device": "cuda", "kernels": "torch", "dtype": "float32", "kv_cache_gib": 0.25}
    async with aengine.Engine(str(tmp_path), max_model_len=128, progress=False, **knobs) as engine:
        for _ in range(2):  # the second time from the cache
            requests = [
                engine.complete(prompt, max_tokens=len(expected.ids[0]), temperature=0, ignore_eos=True, logprobs=1)
                for prompt in expected.prompts
            ]
            assert [list(one.token_ids) for one in await asyncio.gather(*requests)] == expected.ids
        sampled = await engine.complete(expected.prompts[0], max_tokens=8, temperature=1, top_p=0.9, seed=3)
        assert sampled.usage.completion_tokens
        engine.check_integrity()
