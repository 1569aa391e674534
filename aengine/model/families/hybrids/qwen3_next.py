"""Qwen3-Next: three gated delta nets to a layer of gated attention; experts, and a shared one behind a gate."""

from __future__ import annotations

from aengine.model.families.experts import sparse_layers
from aengine.model.families.hybrids.parts import hybrid_layers
from aengine.model.families.hybrids.qwen3_5_moe import experts
from aengine.model.families.parts import mlp
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    sparse = sparse_layers(fields)
    chosen = experts(fields, renormalise=fields.flag("norm_topk_prob", default=True))
    dense = None if all(sparse) else mlp(fields)
    return hybrid_layers(fields, lambda i: chosen if dense is None or sparse[i] else dense, interleaved=True)
