"""Mistral: a sliding window in all layers, or in none."""

from __future__ import annotations

from aengine.errors import UnsupportedModelError
from aengine.model.families.parts import attention, layer_count, layers_of, mlp
from aengine.model.families.windows import layer_types, sliding_window
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    return layers_of(fields, attention(fields), mlp(fields), window_in_all_layers(fields))


def window_in_all_layers(fields: Fields) -> list[int | None]:
    """The window of each layer, one for all of them."""
    window = sliding_window(fields)
    windows = [window] * layer_count(fields)
    if fields.present("layer_types") and layer_types(fields) != [window is not None] * len(windows):
        raise UnsupportedModelError(f"{fields.source}: layer_types that differ from sliding_window are not supported")
    return windows
