"""Families with Mamba2: settings that the cases do not vary, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.spec.feed_forward import ExpertsSpec, MLPSpec
from aengine.model.spec.recurrent import MambaSpec

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


NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hybrid_override_pattern": "ME*M-",
    "mamba_num_heads": 8,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 0.1,  # is not read
    "layer_norm_epsilon": 1e-4,
}
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "mamba_d_ssm": None,
    "mamba_n_heads": 8,
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


@pytest.mark.parametrize("limit", [None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0.0, 1e308]])
def test_steps_without_a_limit(tmp_path: Path, limit: object) -> None:
    assert read(tmp_path, GRANITE, time_step_limit=limit).recurrent


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 3}, "layer_types without attention"),
        ({"layer_types": ["mamba", "attention", "conv"]}, "layer type 'conv'"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"time_step_limit": [0.0, 1e30]}, "time_step_limit"),
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


def test_a_nemotron_of_an_older_file(tmp_path: Path) -> None:
    config = read(tmp_path, NEMOTRON)
    layers = config.layers
    assert [one.recurrent is not None for one in layers] == [True, False, False, True, False]
    assert [one.attending is not None for one in layers] == [False, False, True, False, False]
    assert [type(one.ffn) for one in layers] == [type(None), ExpertsSpec, type(None), type(None), MLPSpec]
    assert config.rms_norm_eps == config.ends.norm.eps == 1e-4
    attention = config.attending[0]
    assert (attention.rope, attention.head_dim) == (None, 128)
    named = read(tmp_path, NEMOTRON, layers_block_type=["mamba", "moe", "attention", "mamba", "mlp"])
    assert named.layers == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MM-"}, "without attention"),
        ({"hybrid_override_pattern": "M*x"}, "layer type 'x'"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ({"sliding_window": 20}, "sliding_window"),
        ({"moe_latent_size": 32, "mlp_bias": True}, "mlp_bias with moe_latent_size"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    ],
)
def test_settings_of_nemotron_that_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, NEMOTRON, **changes)


def test_a_falcon_has_both_in_each_layer(tmp_path: Path) -> None:
    config = read(tmp_path, FALCON)
    assert len(config.recurrent) == len(config.attending) == 2
    assert config.attending[0].rope is not None
    assert "8 Mamba heads" in config.layers[0].indivisible(16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_rms_norm": True}, "mamba_norm_before_gate with mamba_rms_norm"),
        ({"mamba_proj_bias": True, "ssm_in_multiplier": 2.0}, "mamba_proj_bias with ssm_in_multiplier"),
        ({"attention_bias": True, "attention_in_multiplier": 2.0}, "attention_bias with attention_in_multiplier"),
    ],
)
def test_settings_of_falcon_that_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, FALCON, **changes)
