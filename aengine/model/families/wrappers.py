"""Multimodal models: finds their language model in config.json and among the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aengine.errors import UnsupportedModelError
from aengine.model.fields import Fields, shown
from aengine.model.images.read import ImageReader
from aengine.model.quant.config import QUANTIZATION_KEYS

# Prefixes of tensor names in a multimodal model, and in a plain language model. The first prefix that matches is used.
LANGUAGE_MODEL = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.": ""}
# The same for other parts of a multimodal model, in longer and shorter names.
_TOWERS = {
    "model.visual.": "visual.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.embed_vision.": "embed_vision.",
}
# The same for other names of a language model's parts (Ling, Nemotron-H).
OTHER_NAMES = {
    "model.word_embeddings.": "model.embed_tokens.",
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
}
# The same for parts within a layer (Granite with experts, MiMo-V2-Flash).
_PARTS = {
    ".self_attn.attention_sink_bias": ".self_attn.sinks",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
}
# Settings that a file may have inside `text_config` or next to it.
_TIED = "tie_word_embeddings"
_ENDS = ("eos_token_id", "bos_token_id")
_SHARED = (_TIED, *_ENDS, "dtype", "torch_dtype", *QUANTIZATION_KEYS)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal model. Its language model is loaded, and its tower for images if the engine asks for it."""

    families: Mapping[str, str]  # `model_type` of the language model -> its architecture
    ignored_prefixes: tuple[str, ...]  # of the names of all other tensors
    images: ImageReader | None = None  # reads how the model takes images. None: its tower is not supported.
    flat: bool = False  # whether old files have the language model's settings next to `vision_config`

    def family(self, fields: Fields) -> str:
        """Return the architecture of the language model. Raises `UnsupportedModelError` if it is unknown."""
        text = fields.section("text_config")
        if text is None:
            kind = fields.text("model_type", "")  # that of the language model if it was saved alone
            family = self.families.get(kind) or (next(iter(self.families.values())) if self.flat else None)
            if family is None or not fields.present("hidden_size"):
                raise fields.fail("text_config", "is missing")
            return family
        kind = text.text("model_type", next(iter(self.families)))
        if kind not in self.families:
            raise UnsupportedModelError(
                f"{text.source}: model_type {shown(kind)} is not supported; supported are {', '.join(self.families)}"
            )
        return self.families[kind]


def text_model(values: Mapping[str, object], source: str) -> dict[str, object]:
    """Return the language model's settings, with the settings of the multimodal model that also apply to it."""
    text = Fields(values, source).section("text_config")
    if text is None:  # `Wrapper.flat`, or a language model that was saved alone
        return dict(values)
    shared = {key: values[key] for key in _SHARED if values.get(key) is not None}
    own = dict(text.items())
    for key in (_TIED, *_ENDS):
        if key in shared:  # if the file has both, the outer value is used, as in transformers
            own.pop(key, None)
    return shared | own


def ties_by_default(values: Mapping[str, object], source: str) -> bool:
    """Return whether the output matrix is tied by the multimodal settings, but not by the language model's settings.

    transformers writes this if both values are defaults: some multimodal models tie by default, and their language
    models do not. So the value does not tell whether the matrix is tied.
    """
    text = Fields(values, source).section("text_config")
    return text is not None and values.get(_TIED) is True and dict(text.items()).get(_TIED) is False


def language_model_name(name: str) -> str:
    """Return the name of a tensor or module in a plain language model, for its name in a multimodal model."""
    for part, own in _PARTS.items():
        name = name.replace(part, own)
    for outer, inner in (*LANGUAGE_MODEL.items(), *_TOWERS.items(), *OTHER_NAMES.items()):
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name
