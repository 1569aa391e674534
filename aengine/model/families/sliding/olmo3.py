"""OLMo 3: OLMo 2 with a sliding window in three of four layers, whose rotation is never scaled."""

from __future__ import annotations

from aengine.model.families.parts import layers_of, mlp
from aengine.model.families.plain import olmo2
from aengine.model.families.windows import rope_sections, slides_by_layer, sliding_window
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec

_THETA = 500_000.0  # where the file is silent


def layers(fields: Fields) -> list[LayerSpec]:
    slides = slides_by_layer(fields, every=4)
    near, far = (olmo2.heads(fields, rope, _THETA) for rope in rope_sections(fields))
    window = sliding_window(fields)
    return layers_of(
        fields,
        lambda i: near if slides[i] else far,
        mlp(fields),
        [window if slide else None for slide in slides],
        olmo2.NORMS,
    )
