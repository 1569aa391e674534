"""Models that also see or hear: finds their language model in config.json and among the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aengine.errors import UnsupportedModelError
from aengine.model.fields import Fields, shown
from aengine.model.quant.config import QUANTIZATION_KEYS

# Prefixes of a language model's tensors inside a larger model, and outside of one. The first that matches counts.
LANGUAGE_MODEL = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.": ""}
# Settings that a file may have inside `text_config` or next to it.
_TIED = "tie_word_embeddings"
_ENDS = ("eos_token_id", "bos_token_id")
_SHARED = (_TIED, *_ENDS, "dtype", "torch_dtype", *QUANTIZATION_KEYS)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A larger model. Only its language model is loaded."""

    families: Mapping[str, str]  # `model_type` of the language model -> its architecture
    ignored_prefixes: tuple[str, ...]  # of the names of all other tensors

    def family(self, fields: Fields) -> str:
        """Return the architecture of the language model. Raises `UnsupportedModelError` if it is unknown."""
        text = fields.section("text_config")
        if text is None:
            raise fields.fail("text_config", "is missing")
        kind = text.text("model_type", next(iter(self.families)))
        if kind not in self.families:
            raise UnsupportedModelError(
                f"{text.source}: model_type {shown(kind)} is not supported; supported are {', '.join(self.families)}"
            )
        return self.families[kind]


def text_model(values: Mapping[str, object], source: str) -> dict[str, object]:
    """Return the settings of the language model, together with those for all parts of the larger model."""
    text = Fields(values, source).section("text_config")
    shared = {key: values[key] for key in _SHARED if values.get(key) is not None}
    own = {} if text is None else dict(text.items())
    for key in (_TIED, *_ENDS):
        if key in shared:  # transformers prefers it, too, if the file has both
            own.pop(key, None)
    return shared | own


def ties_its_default(values: Mapping[str, object], source: str) -> bool:
    """Return whether the output matrix is tied for the larger model and not for the language model.

    transformers writes both if no one set the value: some larger models tie by default, their language models do not.
    """
    text = Fields(values, source).section("text_config")
    return text is not None and values.get(_TIED) is True and dict(text.items()).get(_TIED) is False


def alone(name: str) -> str:
    """Return the name that a tensor of the language model has outside of a larger model."""
    for outer, inner in LANGUAGE_MODEL.items():
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name
