"""Configurations of small models of every architecture."""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    Kimi_K25ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MuseGlimmerForConditionalGeneration,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLMoeForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.model.unusual_cases import UNUSUAL_CASES
from tests.model.wrapped_configs import (
    gemma3_config,
    gemma4_config,
    kimi_config,
    mistral3_config,
    muse_config,
    qwen2_5_vl_config,
    qwen3_5_config,
    qwen3_vl_moe_config,
)

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 64}
HYBRID: dict[str, object] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "initializer_range": 0.1,  # with larger numbers, their norms would divide by noise
}
_LINEAR_LAST = ["full_attention", "linear_attention", "linear_attention"]
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "final_logit_softcapping": 5.0,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # if tied, the embeddings' scale would make every token follow itself
}
_GEMMA4: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 20,
    "final_logit_softcapping": 5.0,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # as above
}
# The small models: some layers share keys and values, and there is a second embedding.
_GEMMA4_SMALL = _GEMMA4 | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 4096,
    "initializer_range": 0.1,  # their norms follow each other directly and enlarge rounding errors
}
_GEMMA3N: dict[str, object] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "intermediate_size": [96, 96, 64, 64, 96, 96],
    "activation_sparsity_pattern": [0.8, 0.4, 0.0, 0.0, 0.0, 0.0],
    "head_dim": 16,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,  # the other tokens read the first row
    "laurel_rank": 8,
    "sliding_window": 20,
    "final_logit_softcapping": 5.0,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # as above
    "initializer_range": 0.1,
}
_MUSE: dict[str, object] = {
    "num_hidden_layers": 5,  # the first and the last have no window
    "head_dim": 24,
    "sliding_window": 20,
    "rms_norm_eps": 1e-3,  # differs from that of the norms after attention and MLP enough to be seen
    "final_logit_softcapping": 5.0,
    "output_multiplier": 0.5,
    "qk_scale_factor": 1.7,
}
_GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "head_dim": 32,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, object] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "initializer_range": 0.15,
}
_DEEPSEEK_YARN = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}


CASES: dict[str, tuple[type[PreTrainedModel], Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias-untied": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "qwen3-yarn": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "rope_parameters": _YARN}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-window-upper-layer": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "llama2": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-all-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 20}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5}),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen2-moe-some-layers": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        _EXPERTS | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-first-dense": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _EXPERTS | {"mlp_only_layers": [0]}),
    "qwen3-vl-moe": (
        Qwen3VLMoeForConditionalGeneration,
        qwen3_vl_moe_config,
        _EXPERTS | {"head_dim": 16, "moe_intermediate_size": 48},
    ),
    "qwen3-next": (Qwen3NextForCausalLM, Qwen3NextConfig, HYBRID | _SHARED | {"norm_topk_prob": True}),
    "qwen3-next-some-layers": (Qwen3NextForCausalLM, Qwen3NextConfig, HYBRID | _SHARED | {"mlp_only_layers": [1]}),
    "qwen3-5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, HYBRID),
    "qwen3-5-tied": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, HYBRID | {"tie_word_embeddings": True}),
    "qwen3-5-linear-last": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, HYBRID | {"layer_types": _LINEAR_LAST}),
    "qwen3-5-moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, HYBRID | _SHARED),
    "qwen3-5-wrapped": (Qwen3_5ForConditionalGeneration, qwen3_5_config(Qwen3_5Config), HYBRID),
    "qwen3-5-wrapped-tied": (
        Qwen3_5ForConditionalGeneration,
        qwen3_5_config(Qwen3_5Config),
        HYBRID | {"tie_word_embeddings": True},
    ),
    "qwen3-5-moe-wrapped": (Qwen3_5MoeForConditionalGeneration, qwen3_5_config(Qwen3_5MoeConfig), HYBRID | _SHARED),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"pad_token_id": None, "partial_rotary_factor": 0.75}),
    "phi3-window": (Phi3ForCausalLM, Phi3Config, {"pad_token_id": None, "sliding_window": 20}),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"num_hidden_layers": 4, "pad_token_id": None}),
    "smollm3-window": (
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 20, "pad_token_id": None},
    ),
    "seed-oss": (SeedOssForCausalLM, SeedOssConfig, {"head_dim": 32, "pad_token_id": None}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {"pad_token_id": None}),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config,
        {"num_hidden_layers": 4, "sliding_window": 20, "pad_token_id": None, "rope_scaling": _YARN},
    ),
    "ministral3": (
        Ministral3ForCausalLM,
        Ministral3Config,
        {"head_dim": 32, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.3}, "pad_token_id": None},
    ),
    "mistral3": (
        Mistral3ForConditionalGeneration,
        mistral3_config,
        {"head_dim": 16, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.3}},
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, _GEMMA | {"attn_logit_softcapping": 3.0}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        _GEMMA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    # There, transformers does not cap logits.
    "gemma3-that-sees": (Gemma3ForConditionalGeneration, gemma3_config, _GEMMA | {"final_logit_softcapping": None}),
    "gemma3n": (Gemma3nForCausalLM, Gemma3nTextConfig, _GEMMA3N),
    "gemma3n-two-streams": (
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        _GEMMA3N | {"altup_num_inputs": 2, "altup_active_idx": 1, "altup_correct_scale": False},
    ),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_key_value_heads": 4},
    ),
    "gemma4-moe": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        _GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4-small": (Gemma4ForCausalLM, Gemma4TextConfig, _GEMMA4_SMALL),
    "gemma4-that-sees": (Gemma4ForConditionalGeneration, gemma4_config, _GEMMA4_SMALL),
    "gemma4-unified": (
        Gemma4UnifiedForCausalLM,
        Gemma4UnifiedTextConfig,
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "deepseek-v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        _LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek-v3-no-query-rank": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        _LATENT
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True, "rope_interleave": False},
    ),
    "deepseek-v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        _LATENT | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    ),
    "deepseek-v2-lite": (DeepseekV2ForCausalLM, DeepseekV2Config, _LATENT | {"q_lora_rank": None}),
    "glm4-flash": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, _LATENT),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
            "swiglu_limit": 1.5,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "glm4-moe": (Glm4MoeForCausalLM, Glm4MoeConfig, _GLM),
    "glm4-moe-qk-norm-groups": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        _GLM | {"use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ),
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config,
        {"num_hidden_layers": 4, "sliding_window": 20, "head_dim": 32, "rope_parameters": _LLAMA3},
    ),
    "exaone4-no-window": (
        Exaone4ForCausalLM,
        Exaone4Config,
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "dots1": (
        Dots1ForCausalLM,
        Dots1Config,
        {name: value for name, value in _GLM.items() if name != "head_dim"}
        | {"num_hidden_layers": 3, "sliding_window": 20, "max_window_layers": 1},
    ),
    "minimax-m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config,
        {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "hy3": (
        HYV3ForCausalLM,
        HYV3Config,
        _EXPERTS | {"num_hidden_layers": 3, "head_dim": 32, "num_shared_experts": 2, "attention_bias": True},
    ),
    "qwen2-5-vl": (Qwen2_5_VLForConditionalGeneration, qwen2_5_vl_config, {}),
    "kimi-k2-5": (
        Kimi_K25ForConditionalGeneration,
        kimi_config,
        _LATENT | {"n_group": 1, "topk_group": 1, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "muse-glimmer": (MuseGlimmerForConditionalGeneration, muse_config, _MUSE),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}),
    **UNUSUAL_CASES,
}
