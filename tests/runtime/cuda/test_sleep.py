"""A GPU's memory is freed and mapped again under captured graphs, and other weights replace the old ones in place."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import aengine
from aengine.errors import EngineNotReadyError
from aengine.model.loading.hub import DEMO

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.anyio]

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(1000) for _ in range(RNG.randint(3, 300))] for _ in range(6)]
# Of the pages some 6 GiB in float32, and a quarter of it in FP8.
KNOBS: dict[str, Any] = {"device": "cuda", "max_num_seqs": 8, "num_pages": 60_000, "progress": False}
WAYS: list[dict[str, Any]] = [
    {},
    {"cuda_graphs": False},
    {"dtype": "bfloat16", "quantization": "fp8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16", "lora_loading": True},
]


def checkpoint(folder: Path, seed: int) -> Path:
    """Random weights of a small shape whose columns FP8 divides."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=bool(seed % 2),
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("other"), 3)


async def ids(engine: aengine.Engine) -> list[tuple[int, ...]]:
    done = await asyncio.gather(*(engine.complete(prompt, **GREEDY) for prompt in PROMPTS))
    return [one.token_ids for one in done]


def used() -> float:
    """GiB of the device."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


@pytest.mark.parametrize("knobs", WAYS, ids=str)
async def test_memory_goes_and_comes_back_and_weights_change_places(
    one: Path, other: Path, knobs: dict[str, Any]
) -> None:
    async with aengine.Engine(str(other), **KNOBS, **knobs) as engine:
        wanted = await ids(engine)
    async with aengine.Engine(str(one), sleep_mode=True, **KNOBS, **knobs) as engine:
        before = await ids(engine)
        for _ in range(2):
            awake = used()
            await engine.sleep()
            assert awake - used() > 1  # the pages, and the weights
            await engine.wake_up()
            assert used() > awake - 0.5
            assert await ids(engine) == before
        await engine.reload(other)
        assert await ids(engine) == wanted != before
        await engine.sleep()
        await engine.wake_up()
        assert await ids(engine) == wanted
        await engine.reload()
        assert await ids(engine) == before


async def test_memory_that_others_have_is_waited_for(one: Path) -> None:
    async with aengine.Engine(str(one), sleep_mode=True, **KNOBS) as engine:
        before = await ids(engine)
        await engine.sleep()
        torch.cuda.set_per_process_memory_fraction(1.0)  # beyond what the engine lets torch have
        free = torch.cuda.mem_get_info()[0]
        taken = torch.empty(free - 2**31, dtype=torch.uint8, device="cuda")
        for _ in range(2):
            with pytest.raises(EngineNotReadyError, match="others have taken"):
                await engine.wake_up()
            assert engine.is_sleeping
        del taken
        torch.cuda.empty_cache()
        await engine.wake_up()
        assert await ids(engine) == before


async def test_a_closed_engine_leaves_nothing_behind_asleep_or_awake(one: Path) -> None:
    async def cycle(last: bool) -> float:
        async with aengine.Engine(str(one), sleep_mode=True, **KNOBS) as engine:
            await engine.sleep()
            await engine.wake_up()
            if last:
                await engine.sleep()
        torch.cuda.empty_cache()
        return used()

    first = await cycle(last=False)
    assert await cycle(last=True) < first + 1
    assert await cycle(last=False) < first + 1
