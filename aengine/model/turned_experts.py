"""Experts of floats as gpt-oss stores them: inputs before outputs, columns of gate and up by turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from aengine.kernels.experts.rule import ExpertRule
from aengine.model.dense import Storage
from aengine.model.groups import Cut, Entry
from aengine.model.linear import ExpertsSlot
from aengine.model.quant.formats.mxfp4 import gate_first
from aengine.model.ranks.shard import ExpertsShare
from aengine.model.spec import ExpertsSpec


class TurnedExperts:
    """gate_up [experts, hidden, 2 * inner] and down [experts, inner, hidden], brought into the usual form."""

    def __init__(
        self,
        experts: ExpertsSlot,
        name: str,
        spec: ExpertsSpec,
        storage: Storage,
        share: ExpertsShare,
        rule: ExpertRule,
    ) -> None:
        """name: of them all in the checkpoint; share: what a rank has of them."""
        hidden, inner = experts.hidden, spec.inner
        gate_up, down = None, None
        if share.columns is not None:
            start, stop = share.columns
            gate_up, down = Cut(2, ((2 * start, 2 * stop),)), Cut(1, ((start, stop),))
        elif share.count != spec.count:
            gate_up = down = Cut(0, (share.experts,))
        self._names = f"{name}.gate_up_proj", f"{name}.down_proj"
        self.entries = {
            self._names[0]: Entry((spec.count, hidden, 2 * inner), cut=gate_up),
            self._names[1]: Entry((spec.count, inner, hidden), cut=down),
        }
        self._experts = experts
        self._storage = storage
        self._rule = rule
        self._places: dict[str, Tensor] = {}

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        self._places = {name: self._storage.empty(*entry.kept) for name, entry in self.entries.items()}
        return self._places

    def close(self) -> None:
        gate_up, down = (self._places.pop(name) for name in self._names)
        gate_up = gate_first(gate_up.transpose(1, 2)).contiguous()
        self._experts.load(self._storage.kernels.experts(gate_up, down.transpose(1, 2).contiguous(), self._rule))
