"""Families that transformers computes with classes of other names: MiMo and Ling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aengine.errors import UnsupportedModelError
from aengine.model.config import ModelConfig
from tests.engine.checkpoints import with_config
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import assert_mixed, load
from tests.model.test_shards import assert_equal

# By the name in GLM-4.5.
_LING = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
    "model.embed_tokens": "model.word_embeddings",
}
GLM_SETTINGS = {
    "use_qk_norm": True,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "attention_bias": False,
    "vocab_size": 131,
}
_LING_SETTINGS = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "num_experts": 8,
    "num_shared_experts": 2,
    "rotary_dim": 8,
    "rope_theta": 10000.0,
    "score_function": "sigmoid",
    "use_qkv_bias": False,
}
_GLM_KEYS = ("n_routed_experts", "num_local_experts", "n_shared_experts", "attention_bias", "rope_parameters")


def as_ling(folder: Path) -> None:
    """Give a checkpoint of GLM-4.5 the settings and names of Ling."""
    path = folder / "model.safetensors"
    tensors = {}
    stored = load_file(path)
    for name, one in stored.items():
        if ".k_proj" in name or ".v_proj" in name:
            continue
        if ".q_proj" in name:
            one = torch.cat([stored[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            name = name.replace("self_attn.q_proj", "attention.query_key_value")
        for old, new in _LING.items():
            name = name.replace(old, new)
        tensors[name] = one
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _GLM_KEYS}
    (folder / "config.json").write_text(json.dumps(kept | _LING_SETTINGS))


def test_ling_is_glm_with_other_names(tmp_path: Path) -> None:
    model = write_checkpoint("glm4-moe-qk-norm-groups", tmp_path, **GLM_SETTINGS, norm_topk_prob=True, head_dim=16)
    as_ling(tmp_path)
    assert_mixed(load(tmp_path, ()), [model])
    assert_equal(tmp_path, model, 2)


@pytest.mark.parametrize(
    "settings",
    [{"score_function": "softmax"}, {"moe_router_enable_expert_bias": False}],
    ids=lambda one: next(iter(one)),
)
def test_ling_that_is_refused(settings: dict[str, object], tmp_path: Path) -> None:
    write_checkpoint("glm4-moe", tmp_path)
    as_ling(tmp_path)
    with_config(tmp_path, **settings)
    with pytest.raises(UnsupportedModelError, match=next(iter(settings))):
        ModelConfig.from_folder(tmp_path)


def test_mimo_is_qwen2_with_a_layer_that_is_not_read(tmp_path: Path) -> None:
    model = write_checkpoint("qwen2", tmp_path, tie_word_embeddings=False)
    with_config(tmp_path, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128)}, path)
    assert_mixed(load(tmp_path, ()), [model])


def test_ernies_layer_that_drafts_is_not_read(tmp_path: Path) -> None:
    model = write_checkpoint("ernie4-5-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.mtp_block.0.input_layernorm.weight": torch.zeros(64)}, path)
    assert_mixed(load(tmp_path, ()), [model])
