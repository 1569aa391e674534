"""Which experts a GPU has kernels for where they have adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from aengine.model.config import ModelConfig
from aengine.runtime.startup.lora import adapts_experts
from tests.model.checkpoints import write_checkpoint


@pytest.mark.parametrize(("family", "adapts"), [("qwen3", True), ("qwen3-moe", True), ("gpt-oss", False)])
def test_experts_of_floats_with_a_plain_silu(tmp_path: Path, family: str, adapts: bool) -> None:
    write_checkpoint(family, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert adapts_experts(config) is adapts
    assert not adapts_experts(config.in_fp8())
