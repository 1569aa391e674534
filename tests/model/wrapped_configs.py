"""Configurations of small models that see, around the settings of their language models."""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    Gemma3Config,
    Gemma4Config,
    Glm4vConfig,
    Kimi_K25Config,
    Llama4Config,
    Mistral3Config,
    MuseGlimmerConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLMoeConfig,
)

VOCAB = 128
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def mistral3_config(**text: object) -> PreTrainedConfig:
    """A language model inside a model that sees, whose other parts are as small as possible."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied = text.pop("tie_word_embeddings", False)
    return Mistral3Config(
        text_config={"model_type": "ministral3", "pad_token_id": None, **text},
        vision_config={"model_type": "pixtral", "head_dim": 8, **vision},
        tie_word_embeddings=tied,
        image_token_index=1,
    )


def qwen3_5_config(config: type[PreTrainedConfig]) -> Callable[..., PreTrainedConfig]:
    """Like `mistral3_config`, for both kinds of Qwen3.5."""
    return lambda **text: config(
        text_config=text, vision_config=VISION, tie_word_embeddings=text.get("tie_word_embeddings", False)
    )


def gemma3_config(**text: object) -> PreTrainedConfig:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied = text.pop("tie_word_embeddings", True)
    return Gemma3Config(
        text_config={"pad_token_id": None, **text},
        vision_config={"image_size": 28, "patch_size": 14, **vision},
        tie_word_embeddings=tied,
        mm_tokens_per_image=4,
        initializer_range=text["initializer_range"],  # of the output matrix, which is outside the language model
        **{f"{name}_index": VOCAB - 3 + i for i, name in enumerate(("boi_token", "eoi_token", "image_token"))},
        bos_token_id=None,
        eos_token_id=None,
    )


def gemma4_config(**text: object) -> PreTrainedConfig:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied = text.pop("tie_word_embeddings", True)
    return Gemma4Config(
        text_config={**text, "pad_token_id": 0},
        vision_config={**vision, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        audio_config=None,
        tie_word_embeddings=tied,
        initializer_range=text["initializer_range"],
    )


def muse_config(**text: object) -> PreTrainedConfig:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied = text.pop("tie_word_embeddings", False)
    return MuseGlimmerConfig(
        text_config=text,
        vision_config={**vision, "pos_emb_height": 2, "pos_emb_width": 2},
        out_hidden_size=64,
        projector_hidden_size=16,
        tie_word_embeddings=tied,
        initializer_range=text["initializer_range"],  # of the output matrix, which is outside the language model
    )


def qwen2_5_vl_config(**text: object) -> PreTrainedConfig:
    tied = text.get("tie_word_embeddings", False)
    half = 64 // int(str(text["num_attention_heads"])) // 2
    sections = [half // 4, half // 4, half - 2 * (half // 4)]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return Qwen2_5_VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tied)


def qwen3_vl_moe_config(**text: object) -> PreTrainedConfig:
    tied = text.get("tie_word_embeddings", False)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    vision = VISION | {"deepstack_visual_indexes": []}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def glm4v_config(**text: object) -> PreTrainedConfig:
    tied = text.pop("tie_word_embeddings", False)
    pairs = 64 // int(str(text["num_attention_heads"])) // 4
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, "partial_rotary_factor": 0.5}
    return Glm4vConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=VISION | {"image_size": 28, "num_position_embeddings": 4},
        tie_word_embeddings=tied,
    )


def kimi_config(**text: object) -> PreTrainedConfig:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **text},
        vision_config=vision,
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )


def llama4_config(**text: object) -> PreTrainedConfig:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 28, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    return Llama4Config(text_config=text, vision_config={**vision, **sizes}, tie_word_embeddings=False)
