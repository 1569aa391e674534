"""Sliding windows as config.json describes them."""

from __future__ import annotations

from aengine.errors import UnsupportedModelError
from aengine.model.families.parts import layer_count
from aengine.model.fields import Fields, shown


def windows_by_layer(fields: Fields) -> list[int | None]:
    """The window of each layer, as Qwen's files say it: `use_sliding_window`, then layer types or a first layer."""
    layers = layer_count(fields)
    window = sliding_window(fields) if fields.flag("use_sliding_window", default=False) else None
    if fields.present("layer_types"):
        slides = layer_types(fields)
        if any(slides) and window is None:
            raise fields.fail("layer_types", "asks for sliding attention while no sliding_window is in use")
    elif window is not None:
        first = fields.integer("max_window_layers", 0, 2**31, 28)
        slides = [layer >= first for layer in range(layers)]
    else:
        slides = [False] * layers
    return [window if uses else None for uses in slides]


def sliding_window(fields: Fields) -> int | None:
    """A file without the key has always meant 4096; null means no window."""
    if fields.named("sliding_window") and not fields.present("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, 2**31, 4096)


def layer_types(fields: Fields) -> list[bool]:
    """Which layers slide."""
    types = fields.strings("layer_types")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{fields.source}: layer type {shown(kind)} is not supported")
    if len(types) != (layers := layer_count(fields)):
        raise fields.fail("layer_types", f"names {len(types)} layers of {layers}")
    return [kind == "sliding_attention" for kind in types]


def slides_by_layer(fields: Fields, every: int) -> list[bool]:
    """Which layers slide: those named so, or all but every so many."""
    if fields.present("layer_types"):
        return layer_types(fields)
    return [(layer + 1) % every != 0 for layer in range(layer_count(fields))]


def rope_sections(fields: Fields) -> tuple[Fields | None, Fields | None]:
    """The rope settings of layers that slide, and of those that do not, which alone a `rope_scaling` is of.

    None: the file has none but its rope_theta.
    """
    plain = Fields({}, fields.source)
    section = fields.section("rope_parameters")
    if section is None or not (section.present("sliding_attention") or section.present("full_attention")):
        return plain, fields.section("rope_scaling") or section
    return section.section("sliding_attention") or plain, section.section("full_attention") or plain
