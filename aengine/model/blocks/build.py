"""The arguments of blocks when they are built."""

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
    eps: float  # of norms within blocks; `NormSpec` has the eps of all other norms
    tables: PositionTables
    attention: AttentionBackend


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of a layer."""

    index: int  # of the layer in the KV pool
    scales: LoadedKVScales
