"""How many engines the load demands: as many as bring queue and KV use down to their targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Context(Protocol):
    """What of Ray's `AutoscalingContext` is read: what replicas record, by name and replica."""

    current_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class Demand:
    """A policy for Ray's autoscaler, which bounds its answer and waits before it follows it."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = dict(targets)

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """The replicas that the scarcest resource demands; as many as there are where none has reported."""
        metrics = context.aggregated_metrics or {}
        demands = []
        for name, target in self._targets.items():
            if values := metrics.get(name):
                mean = sum(values.values()) / len(values)
                demands.append(context.current_num_replicas * mean / target)
        return max(demands, default=float(context.current_num_replicas)), {}
