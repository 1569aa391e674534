"""The real Qwen3-8B. Set QWEN3_8B_FOLDER=/path/to/checkpoint to run this."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from tests.model.loading_one import load_model

from .harness import Harness

FOLDER = os.environ.get("QWEN3_8B_FOLDER")
CONTINUATION = [
    12095,
    13,
    576,
    6722,
    315,
    9625,
    374,
    12095,
    13,
    576,
    6722,
    315,
    9625,
    374,
    12095,
    13,
    576,
    6722,
    315,
    9625,
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not FOLDER, reason="QWEN3_8B_FOLDER does not name the folder of a Qwen3-8B checkpoint")
def test_the_capital_of_france() -> None:
    folder = Path(FOLDER or "")
    decoder = load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        kernels=TorchKernels(),
        attention=TorchAttention(),
        max_positions=1024,
    )
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("The capital of France is").ids
    (sequence,) = Harness(decoder, page_size=16, num_pages=8).generate([prompt], len(CONTINUATION))
    assert sequence.tokens[len(prompt) :] == CONTINUATION
