"""Command R, StarCoder2 and Phi-3.5-MoE: settings that their cases do not vary, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from aengine.errors import UnsupportedModelError
from aengine.model.config import ModelConfig
from tests.engine.checkpoints import with_config
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import assert_mixed, load

_MSCALE = {"short_mscale": 1.2, "long_mscale": 1.2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": 256,
}


def test_phi_moe_under_its_published_name_with_longrope(tmp_path: Path) -> None:
    model = write_checkpoint("phi-moe", tmp_path, rope_parameters=_LONGROPE | _MSCALE)
    with_config(tmp_path, architectures=["PhiMoEForCausalLM"], rope_parameters=_LONGROPE | _MSCALE)
    assert_mixed(load(tmp_path, ()), [model])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"rope_parameters": _LONGROPE | _MSCALE | {"short_mscale": 1.1}}, "short_mscale"),
    ],
)
def test_phi_moe_that_is_refused(settings: dict[str, object], named: str, tmp_path: Path) -> None:
    write_checkpoint("phi-moe", tmp_path)
    with_config(tmp_path, **settings)
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_folder(tmp_path)


def test_published_files_of_command_r_have_a_longer_context_beside_the_trained_one(tmp_path: Path) -> None:
    write_checkpoint("cohere", tmp_path)
    assert ModelConfig.from_folder(tmp_path).max_position_embeddings == 256
    with_config(tmp_path, model_max_length=1024)
    assert ModelConfig.from_folder(tmp_path).max_position_embeddings == 1024


def test_cohere2_without_layer_types_has_a_window_in_three_of_four_layers(tmp_path: Path) -> None:
    model = write_checkpoint("cohere2", tmp_path)
    with_config(tmp_path, layer_types=None, sliding_window_pattern=4)
    assert ModelConfig.from_folder(tmp_path).windows == [20, 20, 20, None]
    assert_mixed(load(tmp_path, ()), [model])


def test_layers_without_a_bias_anywhere(tmp_path: Path) -> None:
    model = write_checkpoint("starcoder2", tmp_path, use_bias=False, sliding_window=None, tie_word_embeddings=True)
    assert_mixed(load(tmp_path, ()), [model])
