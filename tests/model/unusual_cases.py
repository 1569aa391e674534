"""Configurations of small models whose blocks differ from those of Llama in more than sizes and norms."""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    Glm4vForConditionalGeneration,
    GlmConfig,
    GlmForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.model.wrapped_configs import glm4v_config

_NO_PAD: dict[str, object] = {"pad_token_id": None}
_GLM = _NO_PAD | {"eos_token_id": []}  # their defaults are beyond the vocabulary

UNUSUAL_CASES: dict[str, tuple[type[PreTrainedModel], Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "glm": (GlmForCausalLM, GlmConfig, _GLM | {"head_dim": 32}),
    "glm4": (Glm4ForCausalLM, Glm4Config, _GLM | {"head_dim": 24, "attention_bias": False}),
    "glm4v": (Glm4vForConditionalGeneration, glm4v_config, {}),
}
