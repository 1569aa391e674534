"""Tensors that do not belong to the language model are ignored, and no others."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import UnsupportedModelError, WeightsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import Placement, load_shards
from tests.model.checkpoints import write_checkpoint


def read(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    groups = Decoder(config, TorchKernels(), TorchAttention()).groups
    Checkpoint(folder, groups, config.tie_word_embeddings, config.ignored_prefixes)


def add(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: torch.zeros(2)}, path)


def change(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_a_model_sees_with_is_ignored_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When they are read: headers may be compared several times."""
    write_checkpoint("mistral3", tmp_path)
    place = Placement(torch.device("cpu"), TorchKernels(), TorchAttention())
    with caplog.at_level(logging.INFO, "aengine"):
        read(tmp_path)
        load_shards(tmp_path, ModelConfig.from_folder(tmp_path), [place], dtype=torch.float32)
    [line] = [record.getMessage() for record in caplog.records if record.name == "aengine"]
    assert "ignored" in line
    assert "multi_modal_projector" in line


def test_what_belongs_to_no_known_part_is_refused(tmp_path: Path) -> None:
    write_checkpoint("mistral3", tmp_path)
    add(tmp_path, "audio_tower.weight")
    with pytest.raises(WeightsError, match="audio_tower"):
        read(tmp_path)


def test_an_unknown_language_model_is_refused_with_the_list(tmp_path: Path) -> None:
    write_checkpoint("mistral3", tmp_path)
    change(tmp_path, text_config={"model_type": "mistral4"})
    with pytest.raises(UnsupportedModelError, match="'mistral4' is not supported; supported are mistral, ministral3"):
        read(tmp_path)


def test_layers_that_draft_are_ignored_only_where_the_file_names_them(tmp_path: Path) -> None:
    write_checkpoint("glm4-moe", tmp_path, num_hidden_layers=2)
    add(tmp_path, "model.layers.2.enorm.weight")
    change(tmp_path, num_nextn_predict_layers=1)
    read(tmp_path)
    change(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(WeightsError, match="enorm"):
        read(tmp_path)


@pytest.mark.parametrize("case", ["qwen3", "qwen3-5"])
def test_an_mtp_layer_is_ignored(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    add(tmp_path, "mtp.fc.weight")
    read(tmp_path)


def test_an_mtp_layer_is_refused_in_a_family_that_has_none(tmp_path: Path) -> None:
    write_checkpoint("llama3", tmp_path)
    add(tmp_path, "mtp.fc.weight")
    with pytest.raises(WeightsError, match=r"mtp\.fc\.weight"):
        read(tmp_path)
