"""Checkpoints without weights: the config.json of a shape, for `load_format="dummy"`."""

from __future__ import annotations

import json
import random
from pathlib import Path

# The text of Qwen3.5: three layers of linear attention to one of full.
_HYBRID: dict[str, object] = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
_NOT_MXFP4 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
# transformers' GptOssConfig(), without the numbers of layers and experts.
_GPT_OSS: dict[str, object] = (
    {"hidden_size": 2880, "num_attention_heads": 64, "intermediate_size": 2880}
    | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "vocab_size": 201088}
    | {"num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True}
    | {"rms_norm_eps": 1e-5, "eos_token_id": 200002, "swiglu_limit": 7.0, "rope_theta": 150000.0}
    | {
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096}
    }
    | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_MXFP4}}
)
SHAPES: dict[str, dict[str, object]] = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
    | {"tie_word_embeddings": True},
    "qwen2.5-7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944}
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 152064},
    "32b": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
    "moe30b": {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144}
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    "moe235b": {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "intermediate_size": 12288}
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True},
    "qwen3.5-9b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4, "intermediate_size": 12288}
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    | _HYBRID,
    "qwen3.5-35b-a3b": {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}
    | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 256}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    | _HYBRID,
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "gemma3-12b": {"hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16, "intermediate_size": 15360}
    | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256, "vocab_size": 262208}
    | {"sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
    | {"hidden_activation": "gelu_pytorch_tanh", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "deepseek-v2-lite": {"hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10944}
    | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "q_lora_rank": None}
    | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}
    | {"first_k_dense_replace": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False}
    | {"eos_token_id": 100001},
    "glm-4.7-flash": {"hidden_size": 2048, "num_hidden_layers": 47, "intermediate_size": 10240}
    | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 154880}
    | {"num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 64, "q_lora_rank": 768}
    | {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8}
    | {"norm_topk_prob": True, "eos_token_id": 154820},
}
# `quantization_config` of config.json.
QUANTIZATIONS: dict[str, dict[str, object]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}
# The towers of Qwen3.5-9B and of Gemma 3, and a small one of each family.
TOWERS: dict[str, dict[str, object]] = {
    "qwen3.5": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16},
    "small": {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "patch_size": 16},
    "gemma3": {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
    | {"image_size": 896, "patch_size": 14},
    "gemma3-small": {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    | {"image_size": 256, "patch_size": 16},
}
# The models with a tower around the text of these architectures, and the `model_type` of their text.
_WRAPPERS = {
    "Qwen3ForCausalLM": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "Qwen3_5ForCausalLM": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "Gemma3ForCausalLM": ("Gemma3ForConditionalGeneration", "gemma3_text"),
}
SMALL: dict[str, dict[str, object]] = {
    "30m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
    | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "eos_token_id": 4095}
    | {"tie_word_embeddings": True},
    "gemma3-30m": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1536}
    | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256, "vocab_size": 4096}
    | {"num_key_value_heads": 2, "sliding_window": 128, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}
    | {"hidden_activation": "gelu_pytorch_tanh", "eos_token_id": 4095, "tie_word_embeddings": True},
}


def write_config(folder: Path, shape: str, context: int = 40960, quantization: str | None = None) -> None:
    """A config.json of that shape, Qwen3's unless it says otherwise, its weights in one of `QUANTIZATIONS`."""
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": context,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 151645,
        **(SHAPES | SMALL)[shape],
    }
    if quantization is not None:
        config["quantization_config"] = QUANTIZATIONS[quantization]
    (folder / "config.json").write_text(json.dumps(config))


def add_tower(folder: Path, tower: str, image_token: int, **vision: object) -> None:
    """Give the model of a config.json one of `TOWERS`, and write the file of its image processor.

    image_token: the id of its tokens of images. Gemma 3 has the two ids before it around an image, of which a template
    writes the first. vision: changes the tower.
    """
    path = folder / "config.json"
    text = json.loads(path.read_text())
    [architecture] = text["architectures"]
    wrapper, text["model_type"] = _WRAPPERS[architecture]
    shape, gemma = TOWERS[tower] | vision, architecture == "Gemma3ForCausalLM"
    if gemma:
        ids = {"image_token_index": image_token, "boi_token_index": image_token - 2, "eoi_token_index": image_token - 1}
        size = dict.fromkeys(("height", "width"), shape["image_size"])
    else:
        shape = {"num_position_embeddings": 2304, "out_hidden_size": text["hidden_size"]} | shape
        ids, size = {"image_token_id": image_token}, {"shortest_edge": 2**16, "longest_edge": 2**24}
        if "rope_parameters" not in text:
            part = text["head_dim"] // 6
            sections = [text["head_dim"] // 2 - 2 * part, part, part]
            text["rope_scaling"] = {"rope_type": "default", "mrope_section": sections}
    config = {"architectures": [wrapper], "text_config": text, "vision_config": shape} | ids
    path.write_text(json.dumps(config | {"eos_token_id": text["eos_token_id"], "torch_dtype": "bfloat16"}))
    processor = {"size": size, "patch_size": shape["patch_size"], "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def ids(rng: random.Random, count: int, most: int = 10000) -> list[int]:
    """A prompt. most: the largest id."""
    return [rng.randint(0, most) for _ in range(count)]
