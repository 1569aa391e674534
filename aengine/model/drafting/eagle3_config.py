"""Reads the configuration of an EAGLE-3 or P-EAGLE head, in the two layouts in which heads are published."""

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
from aengine.model.families.heads import Eagle3Spec
from aengine.model.families.plain import llama
from aengine.model.fields import Fields, read_json_object, shown

# Names in `architectures` of heads with Llama's settings at the top of config.json. The first heads were published as
# plain Llama models. They differ from these by their `draft_vocab_size`.
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LLAMA = "LlamaForCausalLM"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_MASKS = ("pard_token", "ptd_token_id", "mask_token_id")  # name the token of masks in P-EAGLE heads
_PARALLEL = ("parallel_drafting", *_MASKS[:2])  # other heads do not have these settings


def read_eagle3(folder: Path, target: ModelConfig) -> Eagle3Spec:
    """Read config.json in a folder, and the names of the tensors if there are weights.

    Raises `UnsupportedModelError` for a head of another kind, and `CheckpointError` for values that are out of
    range or do not fit the target. Both name the setting.
    """
    path = folder / "config.json"
    fields = Fields(read_json_object(path), str(path))
    refuse_quantized(fields)
    settings = _settings(fields)
    kind, inner, read_layers, norm_before_residual = _layout(fields)
    stored = stored_head_names(folder)
    head = asdict(read_head(inner, read_layers, settings, target, stored))
    fc_norm, norm_before_fc = (settings.flag(key, default=False) for key in ("fc_norm", "norm_before_fc"))
    if fc_norm and norm_before_fc:
        raise settings.fail("fc_norm", "and norm_before_fc are both true; set one of them to false")
    changes = {"taps": _taps(settings, len(target.layers)), "has_head": not stored or head["has_head"]}
    return Eagle3Spec(
        **{**head, **changes},
        norm_before_residual=settings.flag("norm_before_residual", default=norm_before_residual),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=settings.flag("norm_output", default=False),
        mask_id=_mask_id(settings, kind, stored, target.vocab_size),
        first_layer="layers.0" if any(name.startswith("layers.0.") for name in stored) else "midlayer",
    )


def _layout(fields: Fields) -> tuple[str, Fields, ReadLayers, bool]:
    """Return the kind of head, the settings of its layers, their reader, and the default of `norm_before_residual`."""
    if fields.present("speculators_model_type"):
        kind = fields.text("speculators_model_type")
        if kind not in ("eagle3", "peagle"):
            raise UnsupportedModelError(
                f"{fields.source}: speculators_model_type {shown(kind)} is not supported, only eagle3 and peagle"
            )
        return kind, *speculators_layers(fields, "llama"), True
    names = fields.strings("architectures") if fields.present("architectures") else []
    is_first = _LLAMA in names and fields.present("draft_vocab_size")
    if not is_first and not any(name in _ARCHITECTURES for name in names):
        what = f"architectures {shown(names)} is no EAGLE-3 head" if names else "architectures is missing"
        raise UnsupportedModelError(
            f"{fields.source}: {what}; supported are {', '.join(_ARCHITECTURES)}, {_LLAMA} with a draft_vocab_size, "
            f"and speculators_model_type eagle3 or peagle. A whole model drafts with speculation=draft=PATH"
        )
    return "eagle3", fields, llama, False


def _settings(fields: Fields) -> Fields:
    """Return the settings of the file and of its section `eagle_config`. A key outside the section is preferred."""
    section = fields.section("eagle_config")
    if section is None:
        return fields
    given = {key: value for key, value in fields.items() if value is not None}
    return Fields({**dict(section.items()), **given}, fields.source)


def _taps(settings: Fields, layers: int) -> tuple[int, ...]:
    """Return the taps of a target with this many layers. Heads number layers as `Taps` does."""
    if not settings.flag("use_aux_hidden_state", default=True):
        raise UnsupportedModelError(
            f"{settings.source}: use_aux_hidden_state is false; heads that read only the last layer are not supported"
        )
    ids = settings.list_of_integers(_TAPS) if settings.present(_TAPS) else []
    if not ids:  # the published default
        ids = [2, layers // 2, layers - 3]
        if not 2 < ids[1] < ids[2]:
            raise settings.fail(_TAPS, f"is missing, and a model of {layers} layers has no default; name the layers")
    if len(set(ids)) != len(ids) or not all(0 <= i <= layers for i in ids):
        raise settings.fail(_TAPS, f"must hold different layers from 0 to {layers} of the model, is {shown(ids)}")
    return tuple(sorted(ids))


def _mask_id(settings: Fields, kind: str, stored: frozenset[str], vocab_size: int) -> int | None:
    """Return the token of masks, or None if the head is no P-EAGLE head. kind: `speculators_model_type`."""
    is_set = (settings.present(key) and dict(settings.items())[key] is not False for key in _PARALLEL)
    if kind != "peagle" and "mask_hidden" not in stored and not any(is_set):
        return None
    key = next((key for key in _MASKS if settings.present(key)), _MASKS[-1])
    return settings.integer(key, 0, vocab_size - 1)
