"""The demo model continues real prompts with the same ids as in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.loading.generation import GenerationDefaults
from aengine.model.loading.hub import resolve_model
from tests.demo_reference import load_demo
from tests.model.loading_one import load_model

from .checkpoints import NEW_TOKENS
from .harness import Harness, Running

PROMPTS = [
    "The capital of France is",
    "The capital of Japan is",
    "The capital of Italy is",
    "The capital of Spain is",
    "The capital of Egypt is",
    "2 + 2 =",
    "7 + 5 =",
    "12 - 4 =",
    "3 * 6 =",
    "Count to ten: 1, 2, 3,",
    "Spell the word cat:",
    "One, two, three,",
    "Hello",
    "Hello! How are you",
    "Good morning",
    "你好",
    "The sun is",
    "Water is",
    "Once upon a time",
    '{"name": "',
    "What is the capital of Germany?",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(None, None)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return load_demo(folder)


@pytest.fixture(scope="module")
def harness(folder: Path) -> Harness:
    decoder = load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
    )
    return Harness(decoder, page_size=16, num_pages=1000)


def assert_greedy(sequences: list[Running], prompts: list[list[int]], oracle: PreTrainedModel) -> None:
    """Each id is the most likely one for transformers after all ids before it, so both continue in the same way."""
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.tokens[: len(prompt)] == prompt
        with torch.inference_mode():
            logits = oracle(torch.tensor([sequence.tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert sequence.tokens[len(prompt) :] == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack(sequence.logits), logits, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_alone(harness: Harness, prompts: list[list[int]], oracle: PreTrainedModel) -> None:
    some = prompts[::4]
    assert_greedy(harness.generate(some, NEW_TOKENS, batch=1), some, oracle)


@pytest.mark.slow
def test_sixteen_at_once_in_chunks(harness: Harness, prompts: list[list[int]], oracle: PreTrainedModel) -> None:
    assert_greedy(harness.generate(prompts, NEW_TOKENS, chunk=5), prompts, oracle)


def test_it_stops_somewhere(folder: Path) -> None:
    assert GenerationDefaults.from_folder(folder, ModelConfig.from_folder(folder)).eos_token_ids
