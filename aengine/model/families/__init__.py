"""The table of model families. A family turns config.json into the layers of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aengine.model.families import (
    centred,
    deepseek,
    gemma,
    gemma3n,
    gemma4,
    hybrids,
    lfm2,
    llama4,
    mamba,
    mimo,
    mixtures,
    mtp,
    muse,
    plain,
)
from aengine.model.families.parts import plain_ends
from aengine.model.families.wrappers import Wrapper
from aengine.model.fields import Fields
from aengine.model.images import families as seeing
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.layer import LayerSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table."""

    title: str  # in model/README.md
    layers: Callable[[Fields], list[LayerSpec]]
    ends: Callable[[Fields], EndsSpec] = plain_ends
    defaults: Mapping[str, object] = field(default_factory=dict)  # for keys that config.json leaves out
    positions: str = "max_position_embeddings"  # the key of the usable positions. If it is absent, this one.
    # Keys that only the publisher's code reads, with the value that is computed here. Other values are refused.
    fixed: Mapping[str, object] = field(default_factory=dict)
    tie: str = ""  # another key of tie_word_embeddings. The embedding is tied unless one of them says otherwise.
    has_layer_settings: bool = False  # whether `layers` reads per_layer_config
    unread: tuple[str, ...] = ()  # prefixes of the names of tensors that the decoder does not use
    mtp: mtp.MTPReader | None = None  # None: no file of the family has a layer that drafts tokens


PHI_MOE = Family("Phi-3.5-MoE", centred.phi_moe, centred.phi_moe_ends, centred.PHI_MOE)

# By the name in `architectures`. Names that end in `Model` or `ForSequenceClassification` belong to the same family.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("Llama 2 and 3.x", plain.llama),
    "Llama4ForCausalLM": Family("Llama 4", llama4.layers, defaults=llama4.LLAMA4),
    "MistralForCausalLM": Family("Mistral", plain.mistral),
    "Qwen2ForCausalLM": Family("Qwen2 and 2.5", plain.qwen2),
    "Qwen3ForCausalLM": Family("Qwen3", plain.qwen3, mtp=mtp.QWEN3),
    "MixtralForCausalLM": Family("Mixtral", mixtures.mixtral, defaults=mixtures.MIXTRAL),
    "Qwen2MoeForCausalLM": Family("Qwen2-MoE", mixtures.qwen2_moe),
    "Qwen3MoeForCausalLM": Family("Qwen3-MoE", mixtures.qwen3_moe),
    "Qwen3VLMoeTextForCausalLM": Family("Qwen3-VL-MoE", mixtures.qwen3_vl_moe, defaults={"rope_theta": 5e5}),
    "OlmoeForCausalLM": Family("OLMoE", mixtures.olmoe, defaults=plain.EPS),
    "Olmo2ForCausalLM": Family("OLMo 2", plain.olmo2, defaults=plain.EPS),
    "Olmo3ForCausalLM": Family("OLMo 3", plain.olmo3, defaults=plain.EPS),
    "Phi3ForCausalLM": Family("Phi-3 and 4", plain.phi3, defaults=plain.EPS),
    "MiMoForCausalLM": Family("MiMo", plain.qwen2, unread=("model.mtp_layers.",)),
    "Ernie4_5ForCausalLM": Family("ERNIE 4.5", plain.ernie4_5, defaults=plain.ERNIE),
    "Ernie4_5_MoeForCausalLM": Family(
        "ERNIE 4.5 with experts", mixtures.ernie4_5_moe, defaults=plain.ERNIE_MOE, unread=("model.mtp_",)
    ),
    "BailingMoeV2ForCausalLM": Family("Ling and Ring 2.0", mixtures.bailing_moe2),
    "GlmForCausalLM": Family("GLM-4", plain.glm, defaults=plain.GLM),
    "Glm4ForCausalLM": Family("GLM-4-0414", plain.glm4, defaults=plain.GLM),
    "Glm4vTextForCausalLM": Family("GLM-4.1V", plain.glm4v, defaults=plain.EPS),
    "GraniteForCausalLM": Family("Granite", plain.granite, plain.granite_ends),
    "SmolLM3ForCausalLM": Family("SmolLM3", plain.smollm3, defaults=plain.SMOLLM3),
    "Exaone4ForCausalLM": Family("EXAONE 4", plain.exaone4, defaults=plain.EPS | {"num_key_value_heads": 32}),
    "InternLM3ForCausalLM": Family("InternLM 3", plain.internlm3, defaults=plain.EPS),
    "SeedOssForCausalLM": Family("Seed-OSS", plain.seed_oss, defaults=plain.SEED_OSS),
    "Ministral3ForCausalLM": Family("Ministral 3", plain.ministral3, defaults=plain.MINISTRAL3),
    "Glm4MoeForCausalLM": Family("GLM-4.5 to 4.7", mixtures.glm4_moe, defaults=plain.EPS, mtp=mtp.GLM),
    "Dots1ForCausalLM": Family("dots.llm1", mixtures.dots1, defaults=mixtures.DOTS1),
    "MiniMaxM2ForCausalLM": Family("MiniMax M2 and M2.5", mixtures.minimax_m2, fixed=mixtures.MINIMAX_FIXED),
    "MiMoV2FlashForCausalLM": Family("MiMo-V2-Flash", mimo.flash, defaults=mimo.FLASH, unread=("model.mtp.",)),
    "HYV3ForCausalLM": Family("Hy3", mixtures.hy3, defaults=mixtures.HY3, fixed=mixtures.HY3_FIXED),
    "Qwen3NextForCausalLM": Family("Qwen3-Next", hybrids.qwen3_next, hybrids.ends, mtp=mtp.HYBRIDS),
    "Qwen3_5ForCausalLM": Family("Qwen3.5/3.6/3.8", hybrids.qwen3_5, hybrids.ends, mtp=mtp.HYBRIDS),
    "Qwen3_5MoeForCausalLM": Family("Qwen3.5/3.6/3.8 with experts", hybrids.qwen3_5_moe, hybrids.ends, mtp=mtp.HYBRIDS),
    "Lfm2ForCausalLM": Family("LFM2", lfm2.layers, lfm2.ends, lfm2.DEFAULTS, tie="tie_embedding"),
    "Lfm2MoeForCausalLM": Family(
        "LFM2 with experts", lfm2.layers_with_experts, lfm2.ends, lfm2.DEFAULTS, tie="tie_embedding"
    ),
    "GraniteMoeHybridForCausalLM": Family("Granite 4", mamba.granite, plain.granite_ends),
    "NemotronHForCausalLM": Family(
        "Nemotron-H and Nemotron 3", mamba.nemotron, defaults=mamba.NEMOTRON, unread=("mtp.",)
    ),
    "FalconH1ForCausalLM": Family(
        "Falcon-H1", mamba.falcon, mamba.falcon_ends, mamba.FALCON, fixed={"mamba_use_mlp": True}
    ),
    "ApertusForCausalLM": Family(
        "Apertus", plain.apertus, defaults=plain.APERTUS, fixed={"qk_norm": True, "post_norm": False}
    ),
    "Gemma2ForCausalLM": Family("Gemma 2", gemma.gemma2, gemma.ends, gemma.GEMMA2),
    "Gemma3ForCausalLM": Family("Gemma 3", gemma.gemma3, gemma.ends, gemma.GEMMA3),
    "Gemma3nForCausalLM": Family("Gemma 3n", gemma3n.layers, gemma3n.ends, gemma3n.GEMMA3N),
    "Gemma4ForCausalLM": Family("Gemma 4", gemma4.layers, gemma4.ends, gemma4.GEMMA4, has_layer_settings=True),
    "Gemma4UnifiedForCausalLM": Family("Gemma 4", gemma4.layers, gemma4.ends, gemma4.UNIFIED, has_layer_settings=True),
    "DeepseekV2ForCausalLM": Family("DeepSeek-V2", deepseek.v2, defaults=deepseek.V2),
    "DeepseekV3ForCausalLM": Family("DeepSeek-V3", deepseek.v3, defaults=deepseek.V3, mtp=mtp.DEEPSEEK),
    "Glm4MoeLiteForCausalLM": Family("GLM-4.7-Flash", deepseek.glm_flash, defaults=deepseek.FLASH, mtp=mtp.GLM),
    "MuseGlimmerTextForCausalLM": Family("Muse Glimmer", muse.layers, muse.ends, muse.GLIMMER),
    "CohereForCausalLM": Family(
        "Command R",
        centred.cohere,
        centred.cohere_ends,
        centred.COHERE,
        positions="model_max_length",
        fixed=centred.COHERE_FIXED,
    ),
    "Cohere2ForCausalLM": Family(
        "Command R7B and A",
        centred.cohere2,
        centred.cohere_ends,
        centred.COHERE2,
        positions="model_max_length",
        fixed=centred.COHERE_FIXED,
    ),
    "Starcoder2ForCausalLM": Family(
        "StarCoder2",
        centred.starcoder2,
        centred.starcoder2_ends,
        centred.STARCODER2,
        fixed={"norm_type": "layer_norm", "mlp_type": "default"},
    ),
    "PhimoeForCausalLM": PHI_MOE,
    "PhiMoEForCausalLM": PHI_MOE,  # the name in published files
    "GptOssForCausalLM": Family("gpt-oss", mixtures.gpt_oss, defaults=mixtures.GPT_OSS),
}

_VISION = ("vision_tower.", "multi_modal_projector.")
_MISTRAL_OR_GEMMA3 = (*_VISION, *(f"model.{name}" for name in _VISION))
_SENSES = ("vision_tower.", "audio_tower.", "vision_embedder.", "embed_vision.", "embed_audio.")
_GEMMA3N_OR_4 = (*_SENSES, *(f"model.{name}" for name in _SENSES))
_SEES = ("vision_tower.", "vision_adapter.", "vision_projection.")
_MUSE = (*_SEES, *(f"model.{name}" for name in _SEES))
_QWEN = ("model.visual.", "visual.")
_KIMI = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
_LLAMA4 = ("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector.")
_KIMI_TEXT = {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}

# Multimodal models, by the name in `architectures`. Towers for images are loaded if the engine asks for them.
WRAPPERS: dict[str, Wrapper] = {
    "Qwen3_5ForConditionalGeneration": Wrapper({"qwen3_5_text": "Qwen3_5ForCausalLM"}, _QWEN, seeing.qwen3_5),
    "Qwen3_5MoeForConditionalGeneration": Wrapper({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, _QWEN, seeing.qwen3_5),
    "Qwen3VLForConditionalGeneration": Wrapper({"qwen3_vl_text": "Qwen3ForCausalLM"}, _QWEN, seeing.qwen3_vl),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(
        {"qwen3_vl_moe_text": "Qwen3VLMoeTextForCausalLM"}, _QWEN, seeing.qwen3_vl
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper({"qwen2_5_vl_text": "Qwen2ForCausalLM"}, _QWEN, flat=True),
    "Qwen2VLForConditionalGeneration": Wrapper({"qwen2_vl_text": "Qwen2ForCausalLM"}, _QWEN, flat=True),
    "Glm4vForConditionalGeneration": Wrapper({"glm4v_text": "Glm4vTextForCausalLM"}, _QWEN, flat=True),
    "Glm4vMoeForConditionalGeneration": Wrapper({"glm4v_moe_text": "Glm4MoeForCausalLM"}, _QWEN),
    "Llama4ForConditionalGeneration": Wrapper({"llama4_text": "Llama4ForCausalLM"}, _LLAMA4),
    "KimiK25ForConditionalGeneration": Wrapper(_KIMI_TEXT, _KIMI),
    "Kimi_K25ForConditionalGeneration": Wrapper(_KIMI_TEXT, _KIMI),  # the name in transformers
    "Mistral3ForConditionalGeneration": Wrapper(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}, _MISTRAL_OR_GEMMA3, seeing.mistral3
    ),
    "Gemma3ForConditionalGeneration": Wrapper({"gemma3_text": "Gemma3ForCausalLM"}, _MISTRAL_OR_GEMMA3, seeing.gemma3),
    "Gemma3nForConditionalGeneration": Wrapper({"gemma3n_text": "Gemma3nForCausalLM"}, _GEMMA3N_OR_4),
    "Gemma4ForConditionalGeneration": Wrapper({"gemma4_text": "Gemma4ForCausalLM"}, _GEMMA3N_OR_4, seeing.gemma4),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, _GEMMA3N_OR_4
    ),
    "MuseGlimmerForConditionalGeneration": Wrapper({"muse_glimmer_text": "MuseGlimmerTextForCausalLM"}, _MUSE),
}


def ignored_prefixes(family: str) -> tuple[str, ...]:
    """Return the prefixes of tensors that files of this family may have and that the decoder does not use."""
    around = (one.ignored_prefixes for one in WRAPPERS.values() if family in one.families.values())
    drafts = FAMILIES[family].mtp
    own = FAMILIES[family].unread
    return (*own, *(() if drafts is None else drafts.prefixes), *(name for names in around for name in names))
