"""What wrapped models say twice, of all their parts and of the language model: which of the two counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from aengine.model.config import ModelConfig
from tests.engine.checkpoints import with_config
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import load


def test_ends_are_those_of_all_parts_where_the_file_names_some(tmp_path: Path) -> None:
    write_checkpoint("gemma4-that-sees", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    with_config(tmp_path, eos_token_id=[1, 106], text_config=text | {"eos_token_id": 1, "bos_token_id": 2})
    config = ModelConfig.from_folder(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((1, 106), 2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tie_that_is_a_wrappers_default_leaves_a_matrix_of_its_own_alone(tied: bool, tmp_path: Path) -> None:
    """transformers writes `true` for Mistral 3 and `false` for what it wraps, whatever the weights hold."""
    write_checkpoint("mistral3", tmp_path, tie_word_embeddings=tied)
    with_config(tmp_path, tie_word_embeddings=True)
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["tie_word_embeddings"] is False
    assert ("language_model.lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    assert ModelConfig.from_folder(tmp_path).tie_word_embeddings == tied
    load(tmp_path, ())
