"""The arguments that blocks of a decoder are built from."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.attention.base import AttentionBackend
from aengine.model.kv_scales import LoadedKVScales
from aengine.model.parameters import Parameters
from aengine.model.rope import PositionTables


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Arguments that all blocks of one decoder share."""

    make: Parameters
    hidden: int
    eps: float  # of the norms within blocks; `NormSpec` has that of the others
    tables: PositionTables
    attention: AttentionBackend


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where a layer's keys and values are in the KV pool."""

    index: int
    scales: LoadedKVScales
