"""The two products of experts, each by itself and in full: for what is to be added to them before they go on."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from aengine.kernels.experts.base import Experts
from aengine.kernels.experts.routing.plan import Plan
from aengine.kernels.experts.rule import ExpertRule


class Apart(Protocol):
    """Of the tokens of one pass."""

    @property
    def plan(self) -> Plan: ...

    @property
    def sorted(self) -> bool:
        """Whether rows lie as `plan.order` says; otherwise those of one token lie behind those of the one before."""
        ...

    def gate_up(self) -> Tensor:
        """Gate and up of every pair, with their biases: [pairs, 2 * inter], gate's first."""
        ...

    def down(self, inner: Tensor) -> Tensor:
        """inner [pairs, inter] -> [pairs, hidden], with its bias."""
        ...


class ApartExperts(Experts, Protocol):
    """Experts whose products can be had so."""

    @property
    def rule(self) -> ExpertRule: ...

    def apart(self, h: Tensor, ids: Tensor) -> Apart:
        """h [tokens, hidden], ids int32 [tokens, k], as `add_to` takes them; both contiguous."""
        ...
