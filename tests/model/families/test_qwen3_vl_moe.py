"""Qwen3-VL with experts: published files have the experts' matrices transposed, files of transformers do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from aengine.errors import UnsupportedModelError
from aengine.model.config import ModelConfig
from tests.model.checkpoints import transpose_experts, write_checkpoint
from tests.model.lora.adapters import assert_mixed, load
from tests.model.test_shards import SIZES, assert_equal


@pytest.mark.parametrize("published", [True, False])
def test_the_shapes_say_whether_experts_are_transposed(published: bool, tmp_path: Path) -> None:
    model = write_checkpoint("qwen3-vl-moe", tmp_path)
    if not published:
        transpose_experts(tmp_path / "model.safetensors")
    first = load_file(tmp_path / "model.safetensors")["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert first.shape == ((7, 64, 96) if published else (7, 96, 64))
    assert_mixed(load(tmp_path, ()), [model])


@pytest.mark.parametrize("columns", [48, pytest.param(33, marks=pytest.mark.slow)])
def test_ranks_read_their_part_of_transposed_experts(columns: int, tmp_path: Path) -> None:
    """Ranks have some columns of all experts, or some whole experts."""
    model = write_checkpoint("qwen3-vl-moe", tmp_path, **SIZES, head_dim=16, moe_intermediate_size=columns)
    model.set_experts_implementation("eager")  # grouped products need multiples of 16 bytes
    assert_equal(tmp_path, model, 2)


@pytest.mark.parametrize("columns", [32, 64])
def test_sizes_that_do_not_show_it_are_refused(columns: int, tmp_path: Path) -> None:
    write_checkpoint("qwen3-vl-moe", tmp_path, moe_intermediate_size=columns)
    with pytest.raises(UnsupportedModelError, match="hidden_size 64 and moe_intermediate_size"):
        ModelConfig.from_folder(tmp_path)
