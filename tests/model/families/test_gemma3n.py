"""Gemma 3n as its publisher writes it: within a model that sees and hears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.config import ModelConfig
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import assert_mixed, load

# Settings that the publisher's files have beside those of the case, and forms that transformers no longer writes.
PUBLISHED: dict[str, Any] = {
    "altup_coef_clip": 120.0,
    "altup_lr_multiplier": 1.0,
    "attention_dropout": 0.0,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
}


def wrap(folder: Path, **text: object) -> None:
    """Rewrite a folder of the language model as one of the whole model."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["architectures"], values["rope_parameters"]
    values |= PUBLISHED | text
    outer = {"audio_config": {}, "vision_config": {}, "audio_soft_tokens_per_image": 188, "eos_token_id": [1, 106]}
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": values}
    path.write_text(json.dumps(outer | whole))
    weights = folder / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in load_file(weights).items()}
    others = ("vision_tower.timm_model.x", "audio_tower.x", "embed_vision.x", "embed_audio.x")
    save_file(tensors | {f"model.{name}": torch.zeros(1) for name in others}, weights)


@pytest.mark.parametrize("case", ["gemma3n", "gemma3n-two-streams"])
def test_the_publishers_files_compute_what_transformers_does(case: str, tmp_path: Path) -> None:
    model = write_checkpoint(case, tmp_path)
    wrap(tmp_path)
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (1, 106)
    assert_mixed(load(tmp_path, ()), [model])


def test_layers_make_streams_first_and_merge_them_last(tmp_path: Path) -> None:
    write_checkpoint("gemma3n", tmp_path)
    layers = ModelConfig.from_folder(tmp_path).layers
    streams = [layer.altup for layer in layers if layer.altup is not None]
    assert [(one.first, one.last) for one in streams] == [(True, False)] + [(False, False)] * 4 + [(False, True)]
    assert [layer.attending.shares_kv_of for layer in layers if layer.attending is not None] == [None] * 3 + [1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"altup_active_idx": 4}, CheckpointError, "altup_active_idx"),
        ({"altup_num_inputs": 1}, CheckpointError, "altup_num_inputs"),
        ({"activation_sparsity_pattern": [0.5]}, CheckpointError, "activation_sparsity_pattern"),
        ({"intermediate_size": [96, 96]}, CheckpointError, "intermediate_size"),
        ({"hidden_activation": "silu"}, UnsupportedModelError, "hidden_activation"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    changes: dict[str, object], error: type[Exception], why: str, tmp_path: Path
) -> None:
    write_checkpoint("gemma3n", tmp_path)
    wrap(tmp_path, **changes)
    with pytest.raises(error, match=why):
        ModelConfig.from_folder(tmp_path)
