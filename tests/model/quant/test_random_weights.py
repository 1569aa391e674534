"""Every quantised format can be filled with random weights, as `load_format="dummy"` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from aengine.model.config import ModelConfig
from tests.model.loading_one import load_model

from ..checkpoints import SHAPE
from ..harness import Harness
from .schemes import SCHEMES


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_weights_give_finite_logits(scheme: str, tmp_path: Path) -> None:
    config = Qwen3Config(**{**SHAPE, "head_dim": 16, "architectures": ["Qwen3ForCausalLM"]}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEMES[scheme].config}))
    decoder = load_model(tmp_path, ModelConfig.from_folder(tmp_path), load_format="dummy")
    [one] = Harness(decoder, page_size=16).generate([[1, 2, 3]], 2)
    logits = torch.stack(one.logits)
    assert logits.isfinite().all()
    assert logits.std() > 0
