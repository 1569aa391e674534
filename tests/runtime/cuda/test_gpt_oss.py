"""gpt-oss on a CUDA device: sinks, windows, biases and clamped gates, in floats and in MXFP4."""

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
from tests.model.quant.test_mxfp4_checkpoints import write_gpt_oss

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

VOCAB = 4096  # of the demo model's tokenizer
GREEDY = {"temperature": 0, "ignore_eos": True}


def add_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = write_checkpoint("gpt-oss", folder, vocab_size=VOCAB)
    add_tokenizer(folder)
    return folder, reference(model, vocab=VOCAB, least=8)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "knobs",
    [{}, {"cuda_graphs": False}, {"lookahead": False}, {"max_step_tokens": 48}, {"together": False}],
    ids=str,
)
async def test_float32_ids_equal_those_of_transformers(
    knobs: dict[str, object], subject: tuple[Path, Reference]
) -> None:
    folder, expected = subject
    settings: dict[str, object] = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.25, "max_num_seqs": 32}
    together = knobs.get("together", True)
    settings |= {"max_model_len": 128, "progress": False} | {key: knobs[key] for key in knobs if key != "together"}
    prompts = expected.prompts if together else expected.prompts[-3:]
    async with aengine.Engine(str(folder), **settings) as engine:
        requests = [engine.complete(prompt, max_tokens=len(expected.ids[0]), **GREEDY) for prompt in prompts]
        completions = await asyncio.gather(*requests) if together else [await request for request in requests]
        engine.check_integrity()
    assert [list(one.token_ids) for one in completions] == expected.ids[-len(prompts) :]


async def logprobs(folder: Path, **knobs: object) -> list[list[float]]:
    """Of the tokens of some prompts, one after the other and all together, in bfloat16."""
    prompts = [[(7 * place + 31 * length) % VOCAB for place in range(length)] for length in (2, 9, 40, 70)]
    settings = {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 0.25, "max_model_len": 128, **knobs}
    async with aengine.Engine(str(folder), progress=False, prefix_cache=False, **settings) as engine:

        async def of(prompt: list[int]) -> list[float]:
            done = await engine.complete(prompt, max_tokens=1, prompt_logprobs=0, **GREEDY)
            found = done.choices[0].prompt_logprobs
            assert found is not None
            return [one.logprob for one in found]

        alone = [await of(prompt) for prompt in prompts]
        return alone + list(await asyncio.gather(*map(of, prompts)))


async def test_mxfp4_means_what_its_dequantised_twin_does(tmp_path: Path) -> None:
    quantised, twin = tmp_path / "quantised", tmp_path / "twin"
    write_gpt_oss(quantised, twin, vocab_size=VOCAB)
    for folder in (quantised, twin):
        add_tokenizer(folder)
    ours, expected = await logprobs(quantised), await logprobs(twin)
    eager = await logprobs(quantised, cuda_graphs=False)
    for mine, theirs, launched in zip(ours, expected, eager, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=0.06, rtol=0)
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(launched), atol=0.06, rtol=0)
