"""Finds the family of a checkpoint, what its model computes after the last layer, and settings that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal

from aengine.errors import UnsupportedModelError
from aengine.model.families import FAMILIES, WRAPPERS, Family
from aengine.model.families.wrappers import Wrapper
from aengine.model.fields import Fields, shown
from aengine.model.spec.feed_forward import ExpertsSpec
from aengine.model.spec.layer import LayerSpec

# The output after the last layer: logits of the vocabulary, logits of classes, or nothing.
Head = Literal["vocabulary", "classes", "none"]
# By the end of a name in `architectures`.
_HEADS: dict[str, Head] = {"ForCausalLM": "vocabulary", "ForSequenceClassification": "classes", "Model": "none"}
# Why known families are refused, by the beginning of their names. model/README.md says what they need.
_REFUSED = {
    "DeepseekV32": "it attends only to tokens that an index chooses",
    "GlmMoeDsa": "it attends only to tokens that an index chooses",
    "DeepseekV4": "it attends to compressed keys that an index chooses, and several streams run through its layers",
}
_MAX_LABELS = 2**16
_LONGEST_NAME = 100  # of an architecture, so that the search for near names is short


def find_architecture(fields: Fields) -> tuple[str, str, Head, Wrapper | None]:
    """Return the architecture, its key in `FAMILIES`, its head, and its multimodal model (None: there is none)."""
    names = fields.strings("architectures") if fields.present("architectures") else []
    for name in names:
        if name in WRAPPERS:
            return name, WRAPPERS[name].family(fields), "vocabulary", WRAPPERS[name]
        for ending, head in _HEADS.items():
            family = f"{name.removesuffix(ending)}ForCausalLM"
            if name.endswith(ending) and family in FAMILIES:
                return name, family, head, None
    known = [*FAMILIES, *WRAPPERS]
    what = f"architecture {shown(names)} is not supported" if names else "architectures is missing"
    if why := next((_REFUSED[start] for name in names for start in _REFUSED if name.startswith(start)), ""):
        raise UnsupportedModelError(
            f'{fields.source}: {what}: {why}; "Refused families" in aengine/model/README.md says what it needs'
        )
    near = [one for name in names[:1] for one in get_close_matches(name[:_LONGEST_NAME], known, 3)]
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    raise UnsupportedModelError(
        f'{fields.source}: {what}{hint}; "Families" in aengine/model/README.md lists all {len(known)}'
    )


def label_count(fields: Fields) -> int:
    """Return the number of classes. transformers writes the names of the classes, or nothing if there are two."""
    if fields.present("num_labels"):
        return fields.integer("num_labels", 1, _MAX_LABELS)
    names = fields.section("id2label")
    if names is None:
        return 2
    if not 1 <= len(names.names()) <= _MAX_LABELS:
        raise fields.fail("id2label", f"must name 1 to {_MAX_LABELS} classes, names {len(names.names())}")
    return len(names.names())


def refuse_unsupported(fields: Fields, family: Family, layers: Sequence[LayerSpec]) -> None:
    """Raise `UnsupportedModelError` if a setting changes the result and the decoder does not support it."""
    if not fields.flag("is_causal", default=True):
        raise UnsupportedModelError(f"{fields.source}: is_causal is false; bidirectional models are not supported")
    if fields.present("swiglu_limit") and not any(_clamps(layer) for layer in layers):
        raise UnsupportedModelError(f"{fields.source}: swiglu_limit is set; clamped gates are not supported here")
    values = dict(fields.items())
    for key, only in family.fixed.items():
        if fields.present(key) and values[key] != only:
            raise UnsupportedModelError(
                f"{fields.source}: {key} {shown(values[key])} is not supported, only {shown(only)}"
            )
    by_layer = fields.section("per_layer_config")
    if by_layer is not None and by_layer.names() and not family.has_layer_settings:
        raise UnsupportedModelError(
            f"{fields.source}: per_layer_config is set; settings of single layers are not supported"
        )


def _clamps(layer: LayerSpec) -> bool:
    return isinstance(layer.ffn, ExpertsSpec) and layer.ffn.clamp is not None


def read_dtype(fields: Fields) -> str:
    """Return the dtype of the checkpoint. Raises `UnsupportedModelError`."""
    key = "dtype" if fields.present("dtype") else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError(f"{fields.source}: {key} {shown(name)} is not supported")
    return name
