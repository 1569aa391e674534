"""The table of model families. A family turns config.json into the layers of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aengine.model.families import deepseek, gemma, gemma4, hybrids, mixtures, muse, plain
from aengine.model.families.parts import plain_ends
from aengine.model.families.wrappers import Wrapper
from aengine.model.fields import Fields
from aengine.model.spec import EndsSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table."""

    title: str  # in model/README.md
    layers: Callable[[Fields], list[LayerSpec]]
    ends: Callable[[Fields], EndsSpec] = plain_ends
    defaults: Mapping[str, object] = field(default_factory=dict)  # for keys that config.json leaves out
    ignored_prefixes: tuple[str, ...] = ()  # of names of tensors that are not used
    has_layer_settings: bool = False  # whether `layers` reads per_layer_config


_DRAFTS = ("mtp.",)  # heads that draft tokens

# By the name in `architectures`. Names that end in `Model` or `ForSequenceClassification` belong to the same family.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("Llama 2 and 3.x", plain.llama),
    "MistralForCausalLM": Family("Mistral", plain.mistral),
    "Qwen2ForCausalLM": Family("Qwen2 and 2.5", plain.qwen2),
    "Qwen3ForCausalLM": Family("Qwen3", plain.qwen3),
    "MixtralForCausalLM": Family("Mixtral", mixtures.mixtral),
    "Qwen2MoeForCausalLM": Family("Qwen2-MoE", mixtures.qwen2_moe),
    "Qwen3MoeForCausalLM": Family("Qwen3-MoE", mixtures.qwen3_moe),
    "OlmoeForCausalLM": Family("OLMoE", mixtures.olmoe),
    "Olmo2ForCausalLM": Family("OLMo 2", plain.olmo2),
    "Olmo3ForCausalLM": Family("OLMo 3", plain.olmo3),
    "Phi3ForCausalLM": Family("Phi-3 and 4", plain.phi3),
    "GraniteForCausalLM": Family("Granite", plain.granite, plain.granite_ends),
    "SmolLM3ForCausalLM": Family("SmolLM3", plain.smollm3, defaults=plain.SMOLLM3),
    "SeedOssForCausalLM": Family("Seed-OSS", plain.seed_oss),
    "Ministral3ForCausalLM": Family("Ministral 3", plain.ministral3),
    "Glm4MoeForCausalLM": Family("GLM-4.5 to 4.7", mixtures.glm4_moe),
    "Qwen3NextForCausalLM": Family("Qwen3-Next", hybrids.qwen3_next, hybrids.ends, ignored_prefixes=_DRAFTS),
    "Qwen3_5ForCausalLM": Family("Qwen3.5/3.6/3.8", hybrids.qwen3_5, hybrids.ends, ignored_prefixes=_DRAFTS),
    "Qwen3_5MoeForCausalLM": Family(
        "Qwen3.5/3.6/3.8 with experts", hybrids.qwen3_5_moe, hybrids.ends, ignored_prefixes=_DRAFTS
    ),
    "Gemma2ForCausalLM": Family("Gemma 2", gemma.gemma2, gemma.ends, gemma.GEMMA2),
    "Gemma3ForCausalLM": Family("Gemma 3", gemma.gemma3, gemma.ends, gemma.GEMMA3),
    "Gemma4ForCausalLM": Family("Gemma 4", gemma4.layers, gemma4.ends, gemma4.GEMMA4, has_layer_settings=True),
    "Gemma4UnifiedForCausalLM": Family("Gemma 4", gemma4.layers, gemma4.ends, gemma4.UNIFIED, has_layer_settings=True),
    "DeepseekV2ForCausalLM": Family("DeepSeek-V2", deepseek.v2, defaults=deepseek.V2),
    "DeepseekV3ForCausalLM": Family("DeepSeek-V3", deepseek.v3, defaults=deepseek.V3),
    "Glm4MoeLiteForCausalLM": Family("GLM-4.7-Flash", deepseek.glm_flash, defaults=deepseek.FLASH),
    "MuseGlimmerTextForCausalLM": Family("Muse Glimmer", muse.layers, muse.ends, muse.GLIMMER),
    "GptOssForCausalLM": Family("gpt-oss", mixtures.gpt_oss, defaults=mixtures.GPT_OSS),
}

_VISION = ("vision_tower.", "multi_modal_projector.")
_MISTRAL_OR_GEMMA3 = (*_VISION, *(f"model.{name}" for name in _VISION))
_SENSES = ("vision_tower.", "audio_tower.", "vision_embedder.", "embed_vision.", "embed_audio.")
_GEMMA4 = (*_SENSES, *(f"model.{name}" for name in _SENSES))
_SEES = ("vision_tower.", "vision_adapter.", "vision_projection.")
_MUSE = (*_SEES, *(f"model.{name}" for name in _SEES))
_QWEN = ("model.visual.", "visual.")

# Multimodal models, by the name in `architectures`. Only their language model is loaded.
WRAPPERS: dict[str, Wrapper] = {
    "Qwen3_5ForConditionalGeneration": Wrapper({"qwen3_5_text": "Qwen3_5ForCausalLM"}, _QWEN),
    "Qwen3_5MoeForConditionalGeneration": Wrapper({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, _QWEN),
    "Mistral3ForConditionalGeneration": Wrapper(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}, _MISTRAL_OR_GEMMA3
    ),
    "Gemma3ForConditionalGeneration": Wrapper({"gemma3_text": "Gemma3ForCausalLM"}, _MISTRAL_OR_GEMMA3),
    "Gemma4ForConditionalGeneration": Wrapper({"gemma4_text": "Gemma4ForCausalLM"}, _GEMMA4),
    "Gemma4UnifiedForConditionalGeneration": Wrapper({"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, _GEMMA4),
    "MuseGlimmerForConditionalGeneration": Wrapper({"muse_glimmer_text": "MuseGlimmerTextForCausalLM"}, _MUSE),
}


def ignored_prefixes(family: str) -> tuple[str, ...]:
    """Return the prefixes of tensors that files of this family may have and that the decoder does not use."""
    around = (one.ignored_prefixes for one in WRAPPERS.values() if family in one.families.values())
    return (*FAMILIES[family].ignored_prefixes, *(name for names in around for name in names))
