"""Computes how many engines the load needs, so that queue and KV usage stay at their targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Context(Protocol):
    """The part of Ray's `AutoscalingContext` that is read. The metrics are by name and replica."""

    current_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class ScalingPolicy:
    """A policy for Ray's autoscaler. Ray itself bounds the number of replicas and waits before it acts."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = dict(targets)

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Return the replicas that the scarcest resource needs, or the current number if none has reported."""
        metrics = context.aggregated_metrics or {}
        demands = []
        for name, target in self._targets.items():
            if values := metrics.get(name):
                mean = sum(values.values()) / len(values)
                demands.append(context.current_num_replicas * mean / target)
        return max(demands, default=float(context.current_num_replicas)), {}
