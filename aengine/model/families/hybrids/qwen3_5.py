"""Qwen3.5, 3.6 and 3.8: three gated delta nets to a layer of gated attention."""

from __future__ import annotations

from aengine.model.families.hybrids.parts import hybrid_layers
from aengine.model.families.parts import mlp
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    return hybrid_layers(fields, mlp(fields))
