"""Reading config.json of models with latents, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.spec.attention import LatentSpec
from aengine.model.spec.feed_forward import ExpertsSpec

VALUES: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
    "q_lora_rank": 48,
    "vocab_size": 128,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}


def read(folder: Path, **values: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(VALUES | values))
    return ModelConfig.from_folder(folder)


def test_a_token_leaves_one_latent_in_each_layer(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.kv_shape(16, torch.bfloat16).page_bytes == 5 * 16 * (512 + 64) * 2
    assert config.spread_over(4).kv_shape(16, torch.bfloat16).page_bytes == 5 * 16 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, [True] * 3 + [False] * 2),
        ({"first_k_dense_replace": 1}, [True] + [False] * 4),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, [False] * 5),
        ({"architectures": ["Glm4MoeLiteForCausalLM"]}, [True] + [False] * 4),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["sparse", "dense"] * 2 + ["sparse"]},
            [False, True, False, True, False],
        ),
    ],
)
def test_which_layers_have_experts(changes: dict[str, object], dense: list[bool], tmp_path: Path) -> None:
    assert [not isinstance(layer.ffn, ExpertsSpec) for layer in read(tmp_path, **changes).layers] == dense


@pytest.mark.parametrize(
    ("scaling", "sharper"), [(None, 1.0), (YARN, 1.3688879454113936), (YARN | {"mscale_all_dim": 0}, 1)]
)
def test_yarn_makes_scores_sharper(scaling: object, sharper: float, tmp_path: Path) -> None:
    attention = read(tmp_path, rope_scaling=scaling).layers[0].attention
    assert isinstance(attention, LatentSpec)
    assert attention.scale == pytest.approx((128 + 64) ** -0.5 * sharper**2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"num_attention_heads": 8192}, "num_attention_heads"),
        ({"n_group": 3, "topk_group": 2}, "n_routed_experts and n_group"),
        ({"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["dense"]}, "mlp_layer_types must name 5"),
    ],
)
def test_values_that_no_model_has(changes: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=why):
        read(tmp_path, **changes)


def test_another_choice_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="topk_method 'noaux_tc'"):
        read(tmp_path, architectures=["DeepseekV2ForCausalLM"], topk_method="noaux_tc")
