"""Configurations of small models whose blocks differ from those of Llama in more than sizes and norms."""

from __future__ import annotations

from collections.abc import Callable

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
    Glm4Config,
    Glm4ForCausalLM,
    Glm4vForConditionalGeneration,
    GlmConfig,
    GlmForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tests.model.wrapped_configs import glm4v_config

_NO_PAD: dict[str, object] = {"pad_token_id": None}
_GLM = _NO_PAD | {"eos_token_id": []}  # their defaults are beyond the vocabulary

_COHERE = _NO_PAD | {"logit_scale": 0.5}

_LFM2: dict[str, object] = _NO_PAD | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "conv", "full_attention"],
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

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
