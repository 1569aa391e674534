"""Reads the configuration of a DFlash head, in the two layouts in which heads are published."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import asdict

from aengine.errors import UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.drafting.head_config import (
    ReadLayers,
    read_head,
    refuse_quantized,
    speculators_layers,
    stored_head_names,
)
from aengine.model.families.heads import DFlashSpec
from aengine.model.families.plain import qwen3
from aengine.model.fields import Fields, read_json_object, shown

_ARCHITECTURE = "DFlashDraftModel"  # of heads with Qwen3's settings at the top of config.json
_SECTION = "dflash_config"
# Settings that change what a head computes, each with the value that changes nothing.
_NEUTRAL: dict[str, object] = {
    "use_swa": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "attention_mode": "gqa",
}
_MOST_BLOCK = 1024


def read_dflash(folder: Path, target: ModelConfig) -> DFlashSpec:
    """Read config.json in a folder, and the names of the tensors if there are weights.

    Raises `UnsupportedModelError` for a head of another kind, and `CheckpointError` for values that are out of
    range or do not fit the target. Both name the setting.
    """
    path = folder / "config.json"
    fields = Fields(read_json_object(path), str(path))
    refuse_quantized(fields)
    inner, read_layers, taps_key = _layout(fields)
    settings = _settings(fields)
    _refuse_unsupported(settings)
    head = read_head(inner, read_layers, settings, target, stored_head_names(folder), target.hidden_size)
    return DFlashSpec(
        **{**asdict(head), "taps": _taps(settings, taps_key, len(target.layers))},
        block_size=settings.integer("block_size", 2, _MOST_BLOCK),
        mask_id=settings.integer("mask_token_id", 0, target.vocab_size - 1),
        is_causal=settings.flag("causal", default=False),
    )


def _layout(fields: Fields) -> tuple[Fields, ReadLayers, str]:
    """Return the settings of the layers, the function that reads them, and the key of the taps."""
    if fields.present("speculators_model_type"):
        kind = fields.text("speculators_model_type")
        if kind != "dflash":
            raise UnsupportedModelError(
                f"{fields.source}: speculators_model_type {shown(kind)} is no DFlash head; only dflash is supported"
            )
        return *speculators_layers(fields, "qwen3"), "aux_hidden_state_layer_ids"
    names = fields.strings("architectures") if fields.present("architectures") else []
    if _ARCHITECTURE not in names:
        what = f"architectures {shown(names)} is no DFlash head" if names else "architectures is missing"
        raise UnsupportedModelError(
            f"{fields.source}: {what}; supported are {_ARCHITECTURE} and speculators_model_type dflash. "
            f"A whole model drafts with speculation=draft=PATH"
        )
    return fields, qwen3, "target_layer_ids"


def _settings(fields: Fields) -> Fields:
    """Return the settings of the file and of its section `dflash_config`. A key of the section is preferred."""
    section = fields.section(_SECTION)
    if section is None:
        return fields
    given = {key: value for key, value in section.items() if value is not None}
    return Fields({**dict(fields.items()), **given}, fields.source)


def _taps(settings: Fields, key: str, layers: int) -> tuple[int, ...]:
    """Return the taps of a target with this many layers. Files name the layers whose outputs are read."""
    ids = settings.list_of_integers(key)
    if not ids or sorted(set(ids)) != ids or not all(0 <= i < layers for i in ids):
        raise settings.fail(key, f"must hold ascending layers from 0 to {layers - 1} of the model, is {shown(ids)}")
    return tuple(i + 1 for i in ids)


def _refuse_unsupported(settings: Fields) -> None:
    """Raise `UnsupportedModelError` if a setting changes what a head computes in a way that is not supported."""
    values = dict(settings.items())
    for key, neutral in _NEUTRAL.items():
        if settings.present(key) and values[key] != neutral:
            raise UnsupportedModelError(
                f"{settings.source}: {key} {shown(values[key])} is not supported in DFlash heads; use a head without it"
            )
