"""Settings that a file has twice, for the whole model and for its language model: which one counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aengine.errors import CheckpointError
from aengine.model.config import ModelConfig
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import assert_mixed, load


def with_outer_settings(folder: Path, **changes: object) -> None:
    """Change settings of the whole model in a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_ends_are_those_of_all_parts_where_the_file_names_some(tmp_path: Path) -> None:
    write_checkpoint("gemma4-that-sees", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    with_outer_settings(tmp_path, eos_token_id=[1, 106], text_config=text | {"eos_token_id": 1, "bos_token_id": 2})
    config = ModelConfig.from_folder(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((1, 106), 2)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("case", ["qwen3-5", "qwen3-5-moe", "ministral3", "gemma3", "gemma3n", "gemma4"])
def test_names_within_another_are_found_whatever_the_architecture_says(case: str, prefix: str, tmp_path: Path) -> None:
    """transformers can load only the language model of a model that sees. It saves it under the old names."""
    write_checkpoint(case, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("model.", prefix, 1): one for name, one in load_file(path).items()}
    sees = {"model.visual.x": torch.zeros(1)} if case.startswith("qwen") else {"model.vision_tower.x": torch.zeros(1)}
    save_file(tensors | sees, path)
    load(tmp_path, ())


def test_a_language_model_that_transformers_saved_alone(tmp_path: Path) -> None:
    write_checkpoint("qwen3-5-wrapped", tmp_path / "whole")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    alone.save_pretrained(tmp_path / "alone")
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["architectures"] == ["Qwen3_5ForCausalLM"]
    assert "model.language_model.norm.weight" in load_file(tmp_path / "alone" / "model.safetensors")
    assert_mixed(load(tmp_path / "alone", ()), [alone])


def test_a_language_model_alone_whose_file_still_names_the_whole_model(tmp_path: Path) -> None:
    """Some pruned and fine-tuned models are published so: `model_type` tells what the settings are."""
    write_checkpoint("qwen3-5-wrapped", tmp_path / "whole")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    alone.save_pretrained(tmp_path / "alone")
    with_outer_settings(tmp_path / "alone", architectures=["Qwen3_5ForConditionalGeneration"])
    assert_mixed(load(tmp_path / "alone", ()), [alone])
    config = ModelConfig.from_folder(tmp_path / "alone")
    assert config.images is None
    assert "has no vision_config" in config.no_images
    with_outer_settings(tmp_path / "alone", model_type="qwen3_5")
    with pytest.raises(CheckpointError, match="text_config is missing"):
        ModelConfig.from_folder(tmp_path / "alone")


@pytest.mark.parametrize("tied", [True, False])
def test_a_tie_that_is_a_wrappers_default_leaves_a_matrix_of_its_own_alone(tied: bool, tmp_path: Path) -> None:
    """transformers writes `true` for Mistral 3 and `false` for its language model, whatever the weights are."""
    write_checkpoint("mistral3", tmp_path, tie_word_embeddings=tied)
    with_outer_settings(tmp_path, tie_word_embeddings=True)
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["tie_word_embeddings"] is False
    assert ("language_model.lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    assert ModelConfig.from_folder(tmp_path).tie_word_embeddings == tied
    load(tmp_path, ())


def test_a_published_file_of_qwen2_5_vl_has_the_language_models_settings_at_the_top(tmp_path: Path) -> None:
    model = write_checkpoint("qwen2-5-vl", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    text = values.pop("text_config")
    del text["rope_parameters"]
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 4]}}
    path.write_text(json.dumps(text | values | rope))
    weights = tmp_path / "model.safetensors"
    save_file(
        {name.replace("model.language_model.", "model."): one for name, one in load_file(weights).items()}, weights
    )
    assert_mixed(load(tmp_path, ()), [model])
