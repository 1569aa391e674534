"""Configurations of small models whose blocks differ from those of Llama in more than sizes and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4vForConditionalGeneration,
    GlmConfig,
    GlmForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tests.model.wrapped_configs import glm4v_config, llama4_config

_NO_PAD: dict[str, object] = {"pad_token_id": None}
_GLM = _NO_PAD | {"eos_token_id": []}  # their defaults are beyond the vocabulary

_COHERE = _NO_PAD | {"logit_scale": 0.5}

_LFM2: dict[str, object] = _NO_PAD | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "conv", "full_attention"],
    "tie_word_embeddings": False,
}
_GRANITE4: dict[str, object] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "mamba_d_head": 16,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
_NEMOTRON: dict[str, object] = {
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 20,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
    "time_step_min": 1e-30,  # otherwise transformers limits steps, but in prompts only
    "rescale_prenorm_residual": False,
    "pad_token_id": None,
}
_FALCON_H1: dict[str, object] = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 20,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.7, 0.6],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.6, 0.7, 0.8, 0.9, 1.1],
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_LLAMA4: dict[str, object] = _NO_PAD | {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 6,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 48,  # shorter than the longest prompts with their answers
    "floor_scale": 12,
    "attn_scale": 0.5,
    "rope_parameters": _LLAMA3 | {"high_freq_factor": 1.0},
}


class TextOfLlama4(Llama4ForConditionalGeneration):
    """Text alone: some versions of transformers look for the results of images even if there are none."""

    def forward(self, input_ids: Tensor, pixel_values: None = None, **rest: Any) -> Any:
        return self.language_model(input_ids, **rest)


TextOfLlama4.__name__ = Llama4ForConditionalGeneration.__name__  # is written to config.json

UNUSUAL_CASES: dict[str, tuple[type[PreTrainedModel], Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "glm": (GlmForCausalLM, GlmConfig, _GLM | {"head_dim": 32}),
    "glm4": (Glm4ForCausalLM, Glm4Config, _GLM | {"head_dim": 24, "attention_bias": False}),
    "glm4v": (Glm4vForConditionalGeneration, glm4v_config, {}),
    "cohere": (CohereForCausalLM, CohereConfig, _COHERE | {"tie_word_embeddings": False}),
    "cohere-qk-norm": (CohereForCausalLM, CohereConfig, _COHERE | {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, _COHERE | {"num_hidden_layers": 4, "sliding_window": 20}),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config, {"sliding_window": 20, "tie_word_embeddings": False}),
    "ernie4-5": (Ernie4_5ForCausalLM, Ernie4_5Config, {"head_dim": 24, "use_bias": True}),
    "ernie4-5-moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "apertus": (ApertusForCausalLM, ApertusConfig, _NO_PAD | {"rope_parameters": _LLAMA3}),
    "granite4-hybrid": (GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, _GRANITE4 | {"num_local_experts": 0}),
    "granite4-hybrid-moe": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        _GRANITE4
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "granite4": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        _GRANITE4
        | {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": (
        NemotronHForCausalLM,
        NemotronHConfig,
        _NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
    ),
    "nemotron3": (
        NemotronHForCausalLM,
        NemotronHConfig,
        _NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
            "n_group": 2,
            "topk_group": 1,
            "use_conv_bias": False,
        },
    ),
    "nemotron3-latent": (
        NemotronHForCausalLM,
        NemotronHConfig,
        _NEMOTRON
        | {
            "layers_block_type": ["full_attention", "moe", "linear_attention"],
            "moe_latent_size": 48,
            "use_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "falcon-h1": (FalconH1ForCausalLM, FalconH1Config, _FALCON_H1),
    "falcon-h1-norm": (
        FalconH1ForCausalLM,
        FalconH1Config,
        _FALCON_H1
        | {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
            "mamba_d_ssm": None,
            "mamba_d_head": 16,
            "projectors_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama4": (Llama4ForCausalLM, Llama4TextConfig, _LLAMA4),
    "llama4-wrapped": (
        TextOfLlama4,
        llama4_config,
        _LLAMA4
        | {
            "use_qk_norm": False,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [0, 1, 1, 0],
            "initializer_range": 0.2,
        },
    ),
    "mimo-v2-flash": (
        MiMoV2FlashForCausalLM,
        MiMoV2FlashConfig,
        {
            "num_hidden_layers": 3,  # the first one has neither window nor experts
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
    ),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config, _LFM2 | {"block_multiple_of": 48, "conv_bias": True}),
    "lfm2-moe": (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig,
        _LFM2
        | {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            "layer_types": ["full_attention", "conv", "conv"],
        },
    ),
    "phi-moe": (
        PhimoeForCausalLM,
        PhimoeConfig,
        {"num_local_experts": 6, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
    ),
}
