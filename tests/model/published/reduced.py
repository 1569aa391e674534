"""Published configurations with fewer and narrower layers and fewer tokens. All other settings stay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "configs.json").read_text())
VOCAB = 512
TEXT = 400  # ids below it are text; special tokens beyond the reduced vocabulary move to ids after it
_HEAD_DIM = 16
_SIZES = {  # only for keys that the configuration has
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "intermediate_size": 96,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "hidden_size_per_layer_input": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": _HEAD_DIM,
    "qk_rope_head_dim": 8,
    "v_head_dim": _HEAD_DIM,
    "swa_head_dim": 2 * _HEAD_DIM,
    "swa_v_head_dim": _HEAD_DIM,
    "rotary_dim": _HEAD_DIM,
    "head_dim": 2 * _HEAD_DIM,
    "global_head_dim": 4 * _HEAD_DIM,
    "linear_key_head_dim": _HEAD_DIM,
    "linear_value_head_dim": _HEAD_DIM,
    "sliding_window": 20,
    "sliding_window_size": 19,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "mamba_d_state": _HEAD_DIM,
    "mamba_n_heads": 4,
    "ssm_state_size": _HEAD_DIM,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "time_step_min": 1e-30,  # transformers limits steps of prompts, the publisher's code does not
    "mtp_num_hidden_layers": 0,
    "num_nextn_predict_layers": 0,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_k")
_BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "hybrid_layer_pattern", "moe_layer_freq")
_FOUR = (  # keys of models of which four layers have every kind
    "no_rope_layers",
    "hybrid_layer_pattern",
    "full_attention_interval",
    "linear_num_value_heads",
)
_VISION = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
    "position_embedding_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}


def reduced(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small version of a configuration."""
    text = _reduced_text(config)
    if "text_config" in config:
        text |= {"text_config": _reduced_text(config["text_config"]), "audio_config": None}
    if "vision_config" in config:
        text["vision_config"] = {key: _VISION.get(key, value) for key, value in config["vision_config"].items()}
        if "mm_tokens_per_image" in config:
            text["mm_tokens_per_image"] = 4
    return text


def _reduced_text(config: Mapping[str, Any]) -> dict[str, Any]:
    small = {key: _SIZES[key] if key in _SIZES and value else value for key, value in config.items()}
    small["initializer_range"] = 0.1  # large enough to tell one computation from another
    for key, value in config.items():
        if key.endswith(("_token_id", "_token_index")) or key == "eos_token_id":
            small[key] = [_token(one) for one in value] if isinstance(value, list) else _token(value)
        if key in _EXPERTS and value:
            small[key] = min(value, 16)
        if key in _CHOSEN and value:
            small[key] = min(value, 4)
    if config.get("n_group") or 0 > 1:
        small |= {"n_group": min(config["n_group"], 4), "topk_group": min(config["topk_group"], 2)}
    if "num_hidden_layers" in config:
        _reduce_layers(config, small)
    if "layers_block_type" in config:
        kinds = config["layers_block_type"]
        small["layers_block_type"] = kinds[: kinds.index("attention") + 2]
    if "hidden_size" in config:
        small["vocab_size"] = VOCAB
    if "num_attention_heads" in config:
        _reduce_heads(config, small)
    if "mamba_n_heads" in config:
        if "mamba_d_ssm" in config:
            small["mamba_d_ssm"] = 96
        small["mamba_d_head"] = small.get("mamba_d_ssm", 2 * small["hidden_size"]) // small["mamba_n_heads"]
    if "linear_num_value_heads" in config:
        keys = config["linear_num_key_heads"]
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * config["linear_num_value_heads"] // keys}
    return small


def _reduce_layers(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    kinds = config.get("layer_types") or []
    layers = 2
    if "full_attention" in kinds or "sliding_window_pattern" in config or "text" in str(config.get("model_type")):
        layers = 2 * (kinds.index("full_attention") + 1) if kinds else 6
    if any(key in config for key in _FOUR):
        layers = 4
    if "attention" in kinds:
        layers = kinds.index("attention") + 1
    if "hybrid_override_pattern" in config:
        layers = config["hybrid_override_pattern"].index("*") + 2
        small["hybrid_override_pattern"] = config["hybrid_override_pattern"][:layers]
    if "full_attn_idxs" in config:
        layers = 4
        small["full_attn_idxs"] = [layer for layer in config["full_attn_idxs"] if layer < layers]
    small["num_hidden_layers"] = layers = min(layers, config["num_hidden_layers"])
    for key in _BY_LAYER:
        if isinstance(config.get(key), list):
            small[key] = config[key][:layers]
    if "moe_layers" in config:
        small["moe_layers"] = [layer for layer in config["moe_layers"] if layer < layers]
    if config.get("moe_layer_end_index", -1) >= 0:
        small |= {"moe_layer_start_index": 1, "moe_layer_end_index": layers - 1}
    if config.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = layers // 2
    if config.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1


def _reduce_heads(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    kept = config.get("num_key_value_heads")
    small["num_attention_heads"] = 4
    if kept:
        small["num_key_value_heads"] = min(kept, 2)
        small["num_attention_heads"] = heads // kept * small["num_key_value_heads"]
    if "swa_num_attention_heads" in config:
        small["swa_num_attention_heads"] = small["num_attention_heads"]
        small["swa_num_key_value_heads"] = 2 * small["num_key_value_heads"]
    if config.get("num_global_key_value_heads"):
        small["num_global_key_value_heads"] = 1
    if "kv_lora_rank" in config:
        small["num_attention_heads"] = small["num_key_value_heads"] = 4
        small["head_dim"] = small.get("qk_rope_head_dim")  # transformers' default
        if "head_dim" not in config:
            del small["head_dim"]
    small["hidden_size"] = small["num_attention_heads"] * _HEAD_DIM
    scaling = config.get("rope_scaling") or {}
    if "mrope_section" in scaling:
        pairs = int(small.get("head_dim", _HEAD_DIM) * config.get("partial_rotary_factor", 1.0)) // 2
        height = pairs * 3 // 8
        small["rope_scaling"] = {**scaling, "mrope_section": [pairs - 2 * height, height, height]}
    if "long_factor" in scaling:
        pairs = int(_HEAD_DIM * config.get("partial_rotary_factor", 1.0)) // 2
        factors = {key: scaling[key][:pairs] for key in ("long_factor", "short_factor")}
        small["rope_scaling"] = {**scaling, **factors}


def _token(token_id: int | None) -> int | None:
    return token_id if token_id is None or token_id < TEXT else TEXT + token_id % 100
