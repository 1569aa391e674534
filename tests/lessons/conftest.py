"""The reference of every lesson: 20 greedy tokens of the demo model, by transformers, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.hub import resolve_model
from aengine.text.tokens.tokenizer import Tokenizer
from tests.demo_reference import load_demo
from tests.model.loading_one import load_model

PROMPT = "The capital of France is"
NEW_TOKENS = 20


@dataclass(frozen=True)
class Reference:
    """The prompt and the tokens that every lesson must produce."""

    prompt_ids: list[int]
    output_ids: list[int]
    text: str


@pytest.fixture(scope="session")
def folder() -> Path:
    return resolve_model(None, None)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    model = load_demo(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    prompt_ids: list[int] = tokenizer(PROMPT)["input_ids"]
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt_ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[
            0
        ].tolist()
    output_ids = ids[len(prompt_ids) :]
    return Reference(prompt_ids, output_ids, tokenizer.decode(output_ids, skip_special_tokens=True))


@pytest.fixture(scope="session")
def decoder(folder: Path) -> Decoder:
    return load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
    )
