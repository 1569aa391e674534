"""The engine's memory on a device stays within gpu_memory_utilization for all kinds of requests."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aengine
from aengine.model.config import ModelConfig
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.anyio]

ROWS, CONTEXT, PAGE = 256, 4096, 16
BUDGET = 12 * 2**30  # so little that the KV pool takes all that is left of it: 256 full contexts would take 16 GiB
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "eos_token_id": 151645,
}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 100_000,
    "top_p": 0.9,
    "min_p": 0.001,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logprobs": 20,
    "min_tokens": 8,
    "logit_bias": dict.fromkeys(range(1024), 1.0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    gc.collect()  # memory of earlier tests would count as the engine's
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


async def used_after(folder: Path, work: list[list[tuple[list[int], dict[str, Any]]]]) -> int:
    """Bytes of the device in use after all rounds of requests; torch gives nothing back in between."""
    started: list[Runtime] = []

    def start(
        config: aengine.EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object]
    ) -> Runtime:
        started.append(start_runtime(config, folder, model, begin_text))
        return started[0]

    share = BUDGET / torch.cuda.mem_get_info()[1]
    knobs: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": ROWS, "page_size": PAGE, "progress": False}
    async with aengine.Engine(str(folder), device="cuda", gpu_memory_utilization=share, start=start, **knobs) as engine:
        assert started[0].pool.num_pages < ROWS * CONTEXT // PAGE  # else there is no limit to stay within
        for requests in work:
            await asyncio.gather(*(engine.complete(prompt, ignore_eos=True, **asked) for prompt, asked in requests))
        free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, EVERYTHING], ids=["plain", "top_p", "all"]
)
async def test_prompts_of_all_lengths_and_every_kind_of_sampling(folder: Path, sampling: dict[str, Any]) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(100, 1024))] for _ in range(ROWS)]
    requests = [(prompt, {"max_tokens": rng.randint(32, 128), **sampling}) for prompt in prompts]
    assert await used_after(folder, [requests]) <= BUDGET


async def test_many_prompts_behind_one_long_cached_prefix(folder: Path) -> None:
    """A step of a few thousand tokens reads hundreds of thousands of keys."""
    rng = random.Random(0)
    shared = [rng.randrange(10000) for _ in range(3072)]
    asked = {"max_tokens": 4, "temperature": 0.8}
    behind = [([*shared, *(rng.randrange(10000) for _ in range(16))], asked) for _ in range(ROWS)]
    assert await used_after(folder, [[(shared, asked)], behind]) <= BUDGET


async def test_leaving_gives_all_of_it_back(folder: Path) -> None:
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        await used_after(folder, [[([1, 2, 3], {"max_tokens": 8, "temperature": 0.8})]])
        left = torch.cuda.memory_allocated() - before
    finally:
        gc.enable()
    assert left <= 96 * 2**20  # what cuBLAS keeps for each thread and stream that has used it: 32 MiB
