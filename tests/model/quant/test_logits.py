"""A decoder of a quantised checkpoint computes what one of its dequantised twin does, on the CPU in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.load import load_model

from ..harness import Harness
from .checkpoints import write_quantized
from .schemes import SCHEMES

PROMPTS = [list(range(1, 20)), [7, 3, 7]]
CASES = [
    "mixtral",
    *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen3-bias-untied", "qwen2-moe")),
]


def logits(folder: Path) -> list[torch.Tensor]:
    decoder = load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
    )
    return [torch.stack(one.logits) for one in Harness(decoder, page_size=16).generate(PROMPTS, 4)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_dequantised_twin(scheme: str, case: str, tmp_path: Path) -> None:
    write_quantized(scheme, case, tmp_path / "quantised", tmp_path / "twin")
    for ours, expected in zip(logits(tmp_path / "quantised"), logits(tmp_path / "twin"), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)
