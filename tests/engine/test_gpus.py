"""The demo model spread over two GPUs gives in float32 what it gives on one."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aengine import Engine, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.anyio,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

PROMPTS = ["The capital of France is", "Tell me a story about a fox.", "2 + 2 =", "Why is the sky blue?"] * 3
KINDS = [
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=0.9, seed=7, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=40, temperature=0.7, seed=3, frequency_penalty=0.5, n=2),
]


async def ids(ranks: int, **knobs: object) -> list[list[tuple[int, ...]]]:
    knobs = {"dtype": "float32", "kv_cache_gib": 0.5, "max_num_seqs": 16, "progress": False} | knobs
    async with Engine(device="cuda", tensor_parallel_size=ranks, **knobs) as engine:
        outputs = await asyncio.gather(
            *(engine.complete(prompt, KINDS[number % len(KINDS)]) for number, prompt in enumerate(PROMPTS))
        )
        engine.check_integrity()
        assert len(engine.devices()) == ranks
    return [[choice.token_ids for choice in output.choices] for output in outputs]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
async def test_two_gpus_draw_what_one_draws(graphs: bool) -> None:
    assert await ids(2, cuda_graphs=graphs) == await ids(1, cuda_graphs=graphs)
