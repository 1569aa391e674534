"""Models that see, of which the language model is used: where config.json and the weights have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aengine.errors import UnsupportedModelError
from aengine.model.fields import Fields, shown
from aengine.model.quant.config import QUANTIZATION_KEYS

# What the names of its tensors begin with, and what they would begin with if it stood alone; the first that fits.
LANGUAGE_MODEL = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.": ""}
# Settings that a file may have beside `text_config` or in it.
_TIED = "tie_word_embeddings"
_ENDS = ("eos_token_id", "bos_token_id")
_SHARED = (_TIED, *_ENDS, "dtype", "torch_dtype", *QUANTIZATION_KEYS)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """families: by `model_type` of the language model; aside: what the names of all other tensors begin with."""

    families: Mapping[str, str]
    aside: tuple[str, ...]

    def family(self, fields: Fields) -> str:
        """The architecture of the language model. Raises `UnsupportedModelError` for an unknown one."""
        text = fields.section("text_config")
        if text is None:
            raise fields.fail("text_config", "is missing")
        kind = text.text("model_type", next(iter(self.families)))
        if kind not in self.families:
            raise UnsupportedModelError(
                f"{text.source}: model_type {shown(kind)} is not supported; supported are {', '.join(self.families)}"
            )
        return self.families[kind]


_VISION = ("vision_tower.", "multi_modal_projector.")
_SEEING = (*_VISION, *(f"model.{name}" for name in _VISION))

_HEARING = ("vision_tower.", "audio_tower.", "vision_embedder.", "embed_vision.", "embed_audio.")
_GEMMA4 = (*_HEARING, *(f"model.{name}" for name in _HEARING))

_QWEN = ("model.visual.", "visual.")

WRAPPERS = {
    "Qwen3_5ForConditionalGeneration": Wrapper({"qwen3_5_text": "Qwen3_5ForCausalLM"}, _QWEN),
    "Qwen3_5MoeForConditionalGeneration": Wrapper({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, _QWEN),
    "Mistral3ForConditionalGeneration": Wrapper(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}, _SEEING
    ),
    "Gemma3ForConditionalGeneration": Wrapper({"gemma3_text": "Gemma3ForCausalLM"}, _SEEING),
    "Gemma4ForConditionalGeneration": Wrapper({"gemma4_text": "Gemma4ForCausalLM"}, _GEMMA4),
    "Gemma4UnifiedForConditionalGeneration": Wrapper({"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, _GEMMA4),
}


# Heads for drafts, which are not used.
_DRAFTS = dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), ("mtp.",))


def aside_of(family: str) -> tuple[str, ...]:
    """What the names of tensors begin with that files of a language model hold besides, whatever class wrote them."""
    around = (one.aside for one in WRAPPERS.values() if family in one.families.values())
    return (*_DRAFTS.get(family, ()), *(name for names in around for name in names))


def text_model(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The settings of the language model, with those that the file has for all of its parts."""
    text = Fields(values, source).section("text_config")
    shared = {key: values[key] for key in _SHARED if values.get(key) is not None}
    own = {} if text is None else dict(text.items())
    for key in (_TIED, *_ENDS):
        if key in shared:  # as transformers has it, where both say something
            own.pop(key, None)
    return shared | own


def ties_its_default(values: Mapping[str, object], source: str) -> bool:
    """Whether the file ties the output matrix of all its parts to the embedding, and says no of the language model.

    transformers writes both where nobody has said anything: for some wrappers it is the default, for what they wrap it
    is not.
    """
    text = Fields(values, source).section("text_config")
    return text is not None and values.get(_TIED) is True and dict(text.items()).get(_TIED) is False


def alone(name: str) -> str:
    """What a tensor of a wrapped language model would be called if that stood alone."""
    for outer, inner in LANGUAGE_MODEL.items():
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name
