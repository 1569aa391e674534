"""Reads parts of config.json that draft heads of several kinds have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from aengine.errors import UnsupportedModelError
from aengine.model.checkpoint.weights import has_weights, stored_names
from aengine.model.config import ModelConfig
from aengine.model.families.heads import HeadSpec
from aengine.model.families.parts import MAX_WIDTH, hidden_size, layer_types, norm_eps
from aengine.model.families.plain import llama, qwen3
from aengine.model.fields import Fields, shown
from aengine.model.quant.config import QUANTIZATION_KEYS
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.layer import LayerSpec

_INSTEAD = "use a head that was trained for this model"
ReadLayers = Callable[[Fields], list[LayerSpec]]
# By `model_type` in the layer settings of heads that were trained with the package speculators.
_LAYERS: dict[str, ReadLayers] = {"llama": llama, "qwen3": qwen3}


def read_head(
    inner: Fields,
    read_layers: ReadLayers,
    settings: Fields,
    target: ModelConfig,
    stored: frozenset[str],
    target_hidden_size: int | None = None,
) -> HeadSpec:
    """Return the parts that heads of all kinds have, except for the taps.

    Args:
        inner: The settings of the layers, which `read_layers` reads.
        settings: All other settings.
        stored: `stored_head_names`.
        target_hidden_size: If the settings do not name it. None: the head's.

    Raises: UnsupportedModelError for layers of another kind. CheckpointError for values that do not fit the target.
    """
    if any(layer.altup is not None for layer in target.layers):
        raise UnsupportedModelError(
            "speculation: heads read one residual stream, and this model has several; use ngram"
        )
    layers = read_layers(inner)
    _refuse_layers(inner, layers)
    width = hidden_size(inner)
    if (vocab := inner.vocab_size) != target.vocab_size:
        raise inner.fail("vocab_size", f"is {vocab}, that of the model {target.vocab_size}; {_INSTEAD}")
    states = settings.integer("target_hidden_size", 1, MAX_WIDTH, target_hidden_size or width)
    if states != target.hidden_size:
        key = "target_hidden_size" if settings.present("target_hidden_size") else "hidden_size"
        at = settings if settings.present(key) else inner
        raise at.fail(key, f"is {states}, that of the model {target.hidden_size}; {_INSTEAD}")
    draft_vocab = settings.integer("draft_vocab_size", 1, vocab, vocab)
    return HeadSpec(
        hidden_size=width,
        rms_norm_eps=norm_eps(inner),
        layers=tuple(layers),
        taps=(),
        target_hidden_size=states,
        target_vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        # If the target's do not fit, the head needs its own. Then the weights lack them.
        has_embedding="embed_tokens.weight" in stored or width != states,
        has_head="lm_head.weight" in stored or (width, draft_vocab) != (states, vocab),
        is_mapped="d2t" in stored or draft_vocab != vocab,
    )


def speculators_layers(fields: Fields, default: str) -> tuple[Fields, ReadLayers]:
    """Return the settings of the layers, and the function that reads them. default: of `model_type`."""
    inner = fields.section("transformer_layer_config")
    if inner is None:
        raise fields.fail("transformer_layer_config", "is missing")
    model_type = inner.text("model_type", default)
    if model_type not in _LAYERS:
        raise UnsupportedModelError(
            f"{inner.source}: model_type {shown(model_type)} is not supported, only {' and '.join(_LAYERS)}"
        )
    return inner, _LAYERS[model_type]


def refuse_quantized(fields: Fields) -> None:
    """Raise `UnsupportedModelError` if the head's weights are quantised."""
    if key := next((key for key in QUANTIZATION_KEYS if fields.present(key)), None):
        raise UnsupportedModelError(f"{fields.source}: {key} is set; only draft heads in floats are supported")


def _refuse_layers(fields: Fields, layers: Sequence[LayerSpec]) -> None:
    """Raise `UnsupportedModelError` if the layers have a window, or a rotation that depends on the request."""
    slides = fields.present("layer_types") and any(layer_types(fields))
    for layer in layers:
        attention = layer.attention
        if not isinstance(attention, AttentionSpec) or attention.window is not None or slides:
            raise UnsupportedModelError(
                f"{fields.source}: layer_types: sliding windows of draft heads are not supported"
            )
        if attention.rope is not None and attention.rope.type == "longrope":
            raise UnsupportedModelError(f"{fields.source}: rope type longrope is not supported in draft heads")


def stored_head_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors without `model.`. Empty if the folder has no weights."""
    names = stored_names(folder) if has_weights(folder) else ()
    return frozenset(name.removeprefix("model.") for name in names)
