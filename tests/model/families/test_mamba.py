"""Families with Mamba2: settings that the cases do not vary, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.recurrent_spec import MambaSpec

GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "layer_types": ["mamba", "attention", "mamba"],  # as older files name them
    "mamba_n_heads": 8,
    "position_embedding_type": "nope",
}


def read(folder: Path, config: dict[str, Any], **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return ModelConfig.from_folder(folder)


def test_a_granite_of_an_older_file(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE, num_local_experts=0)
    assert [layer.recurrent is not None for layer in config.layers] == [True, False, True]
    mamba = config.recurrent[0]
    assert isinstance(mamba, MambaSpec)
    assert (mamba.heads, mamba.head_dim, mamba.state_dim, mamba.groups, mamba.conv) == (8, 16, 256, 1, 4)
    assert config.attending[0].rope is None
    assert read(tmp_path, GRANITE, position_embedding_type="rope").attending[0].rope is not None


@pytest.mark.parametrize("limit", [None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]])
def test_steps_without_a_limit(tmp_path: Path, limit: object) -> None:
    assert read(tmp_path, GRANITE, time_step_limit=limit).recurrent


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 3}, "layer_types without attention"),
        ({"layer_types": ["mamba", "attention", "conv"]}, "layer type 'conv'"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"mamba_n_groups": 3}, "8 Mamba heads in 3 groups"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, GRANITE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba", "attention"]}, "names 2 layers of 3"),
        ({"mamba_d_head": 24}, "mamba_n_heads.* is not 128"),
        ({"mamba_d_conv": 100}, "mamba_d_conv"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, GRANITE, **changes)


def test_groups_that_ranks_cannot_divide_are_named(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE, mamba_n_groups=2, num_local_experts=0, num_attention_heads=8)
    assert config.spread_over(2).ranks == 2
    assert "2 groups of Mamba heads" in config.layers[0].indivisible(4)
    assert "8 Mamba heads" in config.layers[0].indivisible(3)
