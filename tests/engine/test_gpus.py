"""The demo model spread over two GPUs gives in float32 what it gives on one."""

from __future__ import annotations

import asyncio
import random

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


RNG = random.Random(3)
# Together more than are summed at once, and nothing but plain draws: from each rank's own tokens.
LONG = [[RNG.randrange(300, 4000) for _ in range(RNG.randint(500, 900))] for _ in range(14)]
PLAIN = [
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.9, seed=7, ignore_eos=True),
]


async def ids(
    ranks: int, prompts: list[str] | list[list[int]], kinds: list[SamplingParams], **knobs: object
) -> list[list[tuple[int, ...]]]:
    knobs = {"dtype": "float32", "kv_cache_gib": 0.5, "max_num_seqs": 16, "progress": False} | knobs
    async with Engine(device="cuda", tensor_parallel_size=ranks, **knobs) as engine:
        outputs = await asyncio.gather(
            *(engine.complete(prompt, kinds[number % len(kinds)]) for number, prompt in enumerate(prompts))
        )
        engine.check_integrity()
        assert len(engine.devices()) == ranks
    return [[choice.token_ids for choice in output.choices] for output in outputs]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
async def test_two_gpus_draw_what_one_draws(graphs: bool) -> None:
    for prompts, kinds in ((PROMPTS, KINDS), (LONG, PLAIN)):
        expected = await ids(1, prompts, kinds, cuda_graphs=graphs)
        assert await ids(2, prompts, kinds, cuda_graphs=graphs) == expected
