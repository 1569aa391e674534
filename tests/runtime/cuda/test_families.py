"""Families whose layers have kernels of their own, on a CUDA device: latents, experts with GELU, heads that are padded,
scores that are capped, pairs of neighbours that are rotated, norms that subtract the mean, short convolutions.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aengine
from aengine.model.loading.hub import DEMO
from tests.model.checkpoints import Reference, reference, write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

VOCAB = 4096  # of the demo model's tokenizer
GREEDY = {"temperature": 0, "ignore_eos": True}
PUBLISHED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "gemma4-moe": ("gemma4-moe", {}),
    "deepseek-v2-lite": ("deepseek-v2-lite", {}),
    "deepseek-v3-wide": ("deepseek-v3", PUBLISHED),
    "glm4-flash": ("glm4-flash", {}),
    "phi3-96": ("phi3", {"hidden_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama-24": ("llama-all-biases", {}),
    "gemma2": ("gemma2", {}),
    "glm4": ("glm4", {}),
    "cohere2": ("cohere2", {}),
    "phi-moe": ("phi-moe", {}),
    "apertus": ("apertus", {}),
    "llama4": ("llama4", {}),
    "mimo-v2-flash": ("mimo-v2-flash", {"head_dim": 32}),
    "lfm2-moe": ("lfm2-moe", {}),
    "granite4-hybrid-moe": ("granite4-hybrid-moe", {}),
    "nemotron-h": ("nemotron-h", {}),
    "nemotron3": ("nemotron3", {}),
    "falcon-h1": ("falcon-h1", {}),
}
WAYS: list[dict[str, object]] = [
    {},
    {"cuda_graphs": False},
    {"lookahead": False, "max_step_tokens": 48},
    {"together": False},
    {"num_pages": 60, "page_size": 3, "window_context": 20},
]


@pytest.fixture(scope="module", params=CASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    case, sizes = CASES[request.param]
    folder = tmp_path_factory.mktemp(case)
    model = write_checkpoint(case, folder, vocab_size=VOCAB, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder, reference(model, vocab=VOCAB, least=8)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("knobs", WAYS, ids=str)
async def test_float32_ids_equal_those_of_transformers(
    knobs: dict[str, object], subject: tuple[Path, Reference]
) -> None:
    folder, expected = subject
    settings: dict[str, object] = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.25, "max_num_seqs": 32}
    settings |= {"max_model_len": 128, "progress": False} | {key: knobs[key] for key in knobs if key != "together"}
    together = knobs.get("together", True)
    prompts = expected.prompts if together else expected.prompts[-3:]
    async with aengine.Engine(str(folder), **settings) as engine:
        for _ in range(2):  # the second time from the cache
            requests = [engine.complete(prompt, max_tokens=len(expected.ids[0]), **GREEDY) for prompt in prompts]
            completions = await asyncio.gather(*requests) if together else [await request for request in requests]
            assert [list(one.token_ids) for one in completions] == expected.ids[-len(prompts) :]
        engine.check_integrity()


async def logprobs(folder: Path, prompts: list[list[int]], **knobs: object) -> torch.Tensor:
    """Of the tokens of all prompts."""
    settings = {"device": "cuda", "kv_cache_gib": 0.25, "max_model_len": 128, "progress": False, **knobs}
    async with aengine.Engine(str(folder), **settings) as engine:
        done = await asyncio.gather(
            *(engine.complete(prompt, max_tokens=1, prompt_logprobs=0, **GREEDY) for prompt in prompts)
        )
    return torch.tensor([one.logprob for each in done for one in each.choices[0].prompt_logprobs or ()])


async def test_bfloat16_is_as_near_as_on_a_cpu(subject: tuple[Path, Reference]) -> None:
    folder, expected = subject
    exact = await logprobs(folder, expected.prompts, dtype="float32")
    here = await logprobs(folder, expected.prompts, dtype="bfloat16")
    there = await logprobs(folder, expected.prompts, dtype="bfloat16", device="cpu")
    assert (here - exact).abs().mean() < 1.5 * (there - exact).abs().mean()
