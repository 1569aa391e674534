"""One small file for each family of models: config.json -> the layers of its decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aengine.model.families.hybrids import qwen3_5, qwen3_5_moe, qwen3_next
from aengine.model.families.hybrids.parts import ends as hybrid_ends
from aengine.model.families.latents import deepseek
from aengine.model.families.mixtures import glm4_moe, mixtral, olmoe, qwen2_moe, qwen3_moe
from aengine.model.families.plain import (
    granite,
    llama,
    ministral3,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
)
from aengine.model.families.sliding import gemma, gemma4, gpt_oss, olmo3
from aengine.model.fields import Fields
from aengine.model.spec import EndsSpec, LayerSpec

# By the name in `architectures`.
FAMILIES: dict[str, Callable[[Fields], list[LayerSpec]]] = {
    "LlamaForCausalLM": llama.layers,
    "MistralForCausalLM": mistral.layers,
    "Qwen2ForCausalLM": qwen2.layers,
    "Qwen3ForCausalLM": qwen3.layers,
    "MixtralForCausalLM": mixtral.layers,
    "Qwen2MoeForCausalLM": qwen2_moe.layers,
    "Qwen3MoeForCausalLM": qwen3_moe.layers,
    "OlmoeForCausalLM": olmoe.layers,
    "Olmo2ForCausalLM": olmo2.layers,
    "Olmo3ForCausalLM": olmo3.layers,
    "Phi3ForCausalLM": phi3.layers,
    "GraniteForCausalLM": granite.layers,
    "SmolLM3ForCausalLM": smollm3.layers,
    "SeedOssForCausalLM": seed_oss.layers,
    "Ministral3ForCausalLM": ministral3.layers,
    "Glm4MoeForCausalLM": glm4_moe.layers,
    "Qwen3NextForCausalLM": qwen3_next.layers,
    "Qwen3_5ForCausalLM": qwen3_5.layers,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe.layers,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Gemma4ForCausalLM": gemma4.layers,
    "Gemma4UnifiedForCausalLM": gemma4.layers,
    "DeepseekV2ForCausalLM": deepseek.v2,
    "DeepseekV3ForCausalLM": deepseek.v3,
    "Glm4MoeLiteForCausalLM": deepseek.glm_flash,
    "GptOssForCausalLM": gpt_oss.layers,
}
_HYBRIDS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
# What stands before their first layer and behind their last one, where it is not the usual.
ENDS: dict[str, Callable[[Fields], EndsSpec]] = {
    "GraniteForCausalLM": granite.ends,
    "Gemma2ForCausalLM": gemma.ends,
    "Gemma3ForCausalLM": gemma.ends,
    "Gemma4ForCausalLM": gemma4.ends,
    "Gemma4UnifiedForCausalLM": gemma4.ends,
    **dict.fromkeys(_HYBRIDS, hybrid_ends),
}
# What config.json means where it is silent, where other families mean something else.
DEFAULTS: dict[str, Mapping[str, object]] = {
    "SmolLM3ForCausalLM": smollm3.DEFAULTS,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma4ForCausalLM": gemma4.GEMMA4,
    "Gemma4UnifiedForCausalLM": gemma4.UNIFIED,
    "DeepseekV2ForCausalLM": deepseek.V2,
    "DeepseekV3ForCausalLM": deepseek.V3,
    "Glm4MoeLiteForCausalLM": deepseek.FLASH,
    "GptOssForCausalLM": gpt_oss.DEFAULTS,
}
