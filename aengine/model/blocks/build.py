"""The arguments of blocks when they are built."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.attention.base import AttentionBackend
from aengine.model.kv_scales import LoadedKVScales
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.rope import PositionTables
from aengine.model.spec.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Arguments that all blocks of one decoder share."""

    make: Parameters
    hidden: int
    eps: float  # of norms within blocks; `NormSpec` has the eps of all other norms
    tables: PositionTables
    attention: AttentionBackend


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of a layer."""

    index: int  # of the layer in the KV pool
    scales: LoadedKVScales


def projected_parts(prefix: str, spec: AttentionSpec) -> dict[str, Part | tuple[Part, ...]]:
    """Return the parts of the projection to queries, keys, values and gates, by name. prefix: of the attention."""
    queries = Part(spec.heads, spec.head_dim * (2 if spec.gates_follow_heads else 1))
    keys, values = Part(spec.kv_heads, spec.head_dim), Part(spec.kv_heads, spec.value_dim or spec.head_dim)
    if spec.fused:
        parts: dict[str, Part | tuple[Part, ...]] = {f"{prefix}.{spec.fused_name}": (queries, keys, values)}
    else:
        names = [f"{prefix}.{one}_proj" for one in "qkv"[: 1 + spec.projected]]
        parts = dict(zip(names, (queries, keys, values)))
    if spec.gate_proj:
        parts[f"{prefix}.gate_proj"] = queries
    return parts
