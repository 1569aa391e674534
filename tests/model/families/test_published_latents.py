"""Models with latents as they were published: their settings and the tensors that are read, by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import entries_of, leave_empty
from aengine.model.spec.attention import LatentSpec
from aengine.model.spec.feed_forward import ExpertsSpec

_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
_YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    **_LATENT,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "quantization_config": _FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**_YARN, "factor": 40, "original_max_position_embeddings": 4096},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 129280,
}
_KIMI = _V3 | {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**_YARN, "beta_fast": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": _V3,
    "DeepSeek-V3.1": _V3 | {"quantization_config": _FP8 | {"scale_fmt": "ue8m0"}},
    "Kimi-K2-Instruct": _KIMI,
    "Kimi-K2-Thinking": _KIMI | {"quantization_config": _INT4},
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        **_LATENT,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": {**_YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
        | {"original_max_position_embeddings": 4096},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "vocab_size": 102400,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "eos_token_id": [154820, 154827, 154829],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
}
# Some tensors of layer 4, with their shapes in the published files.
TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "DeepSeek-V3": {
        "self_attn.q_a_proj.weight_scale_inv": (12, 56),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_a_proj_with_mqa.weight_scale_inv": (5, 56),
        "self_attn.kv_b_proj.weight": (32768, 512),
        "self_attn.kv_b_proj.weight_scale_inv": (256, 4),
        "self_attn.q_b_proj.weight_scale_inv": (192, 12),
        "self_attn.o_proj.weight_scale_inv": (56, 128),
        "mlp.gate.weight": (256, 7168),
        "mlp.gate.e_score_correction_bias": (256,),
        "mlp.experts.255.down_proj.weight_scale_inv": (56, 16),
        "mlp.shared_experts.up_proj.weight_scale_inv": (16, 56),
    },
    "Kimi-K2-Instruct": {
        "self_attn.kv_b_proj.weight_scale_inv": (128, 4),
        "mlp.experts.383.up_proj.weight_scale_inv": (16, 56),
    },
    "Kimi-K2-Thinking": {
        "self_attn.kv_b_proj.weight": (16384, 512),
        "self_attn.o_proj.weight": (7168, 8192),
        "mlp.shared_experts.gate_proj.weight": (2048, 7168),
        "mlp.experts.383.up_proj.weight_packed": (2048, 896),
        "mlp.experts.383.up_proj.weight_scale": (2048, 224),
        "mlp.experts.383.up_proj.weight_shape": (2,),
    },
    "DeepSeek-V2-Lite": {
        "self_attn.q_proj.weight": (3072, 2048),
        "self_attn.kv_b_proj.weight": (4096, 512),
        "mlp.shared_experts.down_proj.weight": (2048, 2816),
    },
    "GLM-4.7-Flash": {
        "self_attn.kv_b_proj.weight": (8960, 512),
        "mlp.gate.e_score_correction_bias": (64,),
        "mlp.shared_experts.down_proj.weight": (2048, 1536),
    },
}
BILLIONS = {"DeepSeek-V3": 671.0, "Kimi-K2-Instruct": 1026.4, "DeepSeek-V2-Lite": 15.7, "GLM-4.7-Flash": 29.9}


def read(folder: Path, name: str, **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_is_understood(name: str, tmp_path: Path) -> None:
    config = read(tmp_path, name)
    assert all(isinstance(layer.attention, LatentSpec) for layer in config.layers)
    dense = CONFIGS[name]["first_k_dense_replace"]
    assert [isinstance(layer.ffn, ExpertsSpec) for layer in config.layers[: dense + 1]] == [False] * dense + [True]
    if name in BILLIONS:
        assert config.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)
    drafts = CONFIGS[name].get("num_nextn_predict_layers", 0)
    assert len([prefix for prefix in config.ignored_prefixes if prefix.startswith("model.layers.")]) == drafts


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_those_of_the_published_files(name: str, tmp_path: Path) -> None:
    config = read(tmp_path, name, num_hidden_layers=5)
    decoder = Decoder(config, TorchKernels(), TorchAttention(), torch.bfloat16)
    entries = entries_of(decoder.groups)
    for tensor, shape in TENSORS[name].items():
        entry = entries[f"model.layers.4.{tensor}"]
        assert shape in (entry.shape, *entry.other_shapes)
    leave_empty(decoder.groups)
