"""The shapes of several GPUs can be dealt out to them, and every rank has its share of the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aengine.model.config import ModelConfig
from bench.shapes import write_config


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "quantization"), [("8b", None), ("32b", None), ("moe30b", None), ("moe30b", "fp8"), ("moe235b", "fp8")]
)
def test_a_share_for_every_rank(shape: str, quantization: str | None, count: int, tmp_path: Path) -> None:
    write_config(tmp_path, shape, quantization=quantization)
    model = ModelConfig.from_folder(tmp_path)
    whole, share = (one.weight_bytes(torch.bfloat16) for one in (model, model.spread_over(count)))
    assert whole <= count * share <= 1.02 * whole
