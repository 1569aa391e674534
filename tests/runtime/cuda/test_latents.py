"""Quantised checkpoints of models with latents, and latents that are kept in FP8, on a CUDA device."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aengine
from aengine.model.loading.hub import DEMO
from tests.model.quant.checkpoints import write_quantized

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

VOCAB = 4096  # of the demo model's tokenizer
GREEDY = {"temperature": 0, "ignore_eos": True}
# A latent of the published width; rows of the projection to it that are no multiple of a block's, and heads that are
# no multiple either.
SIZES: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 448,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "vocab_size": VOCAB,
    "initializer_range": 0.06,
}
PROMPTS = [[(7 * place + 31 * length) % VOCAB for place in range(length)] for length in (1, 2, 9, 40, 70)]
SCHEMES = ["fp8-blocks", "ct-fp8-channel", "ct-int4", "awq", "gptq-desc-act"]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return written("fp8-blocks", tmp_path_factory.mktemp("fp8"))


def written(scheme: str, parent: Path) -> tuple[Path, Path]:
    """A checkpoint, and its dequantised twin."""
    both = parent / "quantised", parent / "twin"
    write_quantized(scheme, "deepseek-v3", *both, **SIZES)
    for folder in both:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, folder)
    return both


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


async def answers(folder: Path, **knobs: object) -> tuple[list[list[int]], Tensor]:
    """All prompts, one after the other and together: the ids, and the logprobs of prompts and answers."""
    settings = {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 0.25, "max_num_seqs": 32, **knobs}
    async with aengine.Engine(str(folder), progress=False, max_model_len=128, **settings) as engine:
        alone = [await engine.complete(prompt, max_tokens=24, logprobs=0, **GREEDY) for prompt in PROMPTS]
        together = await asyncio.gather(
            *(engine.complete(prompt, max_tokens=24, logprobs=0, prompt_logprobs=0, **GREEDY) for prompt in PROMPTS)
        )
        engine.check_integrity()
    done = [*alone, *together]
    sequences = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS * 2, done, strict=True)]
    found = [
        entry.logprob
        for one in done
        for entry in (*(one.choices[0].prompt_logprobs or ()), *(one.choices[0].logprobs or ()))
    ]
    return sequences, torch.tensor(found)


async def scored(folder: Path, sequences: Sequence[list[int]], **knobs: object) -> Tensor:
    """What an engine on the CPU, in float32, makes of the same tokens, in the same order."""
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.25, "max_num_seqs": 32, **knobs}
    async with aengine.Engine(str(folder), progress=False, max_model_len=128, **settings) as engine:
        done = [await engine.complete(one, max_tokens=1, prompt_logprobs=0, **GREEDY) for one in sequences]
    scores = [[entry.logprob for entry in one.choices[0].prompt_logprobs or ()] for one in done]
    firsts = [len(prompt) - 1 for prompt in PROMPTS] + [0] * len(PROMPTS)  # prompts alone were not scored
    return torch.tensor([score for each, first in zip(scores, firsts, strict=True) for score in each[first:]])


def apart_from(expected: Tensor, found: Tensor) -> float:
    """Return the median. A token that rounding sends to other experts changes by more than rounding."""
    return float((found - expected).abs().median() / expected.std())


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_it_computes_what_the_dequantised_twin_does(scheme: str, tmp_path: Path) -> None:
    folder, twin = written(scheme, tmp_path)
    sequences, ours = await answers(folder)
    exact = await scored(twin, sequences)
    apart = apart_from(exact, ours)
    print(f"{scheme}: {apart:.4f}")
    # Inputs of FP8 products are rounded to a mantissa of three bits.
    assert apart < (0.1 if "fp8" in scheme else 0.03)


async def test_floats_become_fp8_while_they_are_loaded(fp8: tuple[Path, Path]) -> None:
    _, twin = fp8
    sequences, ours = await answers(twin, quantization="fp8")
    exact = await scored(twin, sequences)
    apart = apart_from(exact, ours)
    print(f"quantization fp8: {apart:.4f}")
    assert apart < 0.1


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"dtype": "float32"},
        {"cuda_graphs": False},
        {"max_step_tokens": 48, "lookahead": False},
        {"page_size": 3},
    ],
    ids=str,
)
async def test_latents_in_fp8(knobs: dict[str, object], fp8: tuple[Path, Path]) -> None:
    _, twin = fp8
    sequences, ours = await answers(twin, kv_cache_dtype="fp8", **knobs)
    rounded = await scored(twin, sequences, kv_cache_dtype="fp8")
    exact = await scored(twin, sequences)
    cost = apart_from(exact, rounded)
    apart = apart_from(rounded, ours)
    print(f"{knobs}: {apart:.4f} from the same on a CPU, which is {cost:.4f} from exact")
    assert cost > 1e-3  # it can be seen
    # In bfloat16, rounding moves numbers across the borders of codes, as rounding to codes does.
    assert apart < (0.3 if knobs.get("dtype") == "float32" else 1.3) * cost
