"""Chooses the GPUs of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.runtime.startup.sizing.cuda_memory import Budget

COUNTS = (1, 2, 4, 8)
LEAST_ROOM = 0.1  # share of the engine's memory that must be left for keys, values and a step


def choose_gpus(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, first: torch.device
) -> list[torch.device]:
    """Return the configured number of GPUs from `first` on, or the fewest that hold the model. Raises: ConfigError."""
    there = torch.cuda.device_count() - (first.index or 0)
    gpus = [first, *(torch.device("cuda", (first.index or 0) + rank) for rank in range(1, max(there, 1)))]
    if config.tensor_parallel_size == "auto":
        return gpus[: fewest_gpus(model, dtype, gpus, config.gpu_memory_utilization)]
    count = int(config.tensor_parallel_size)
    if count > there:
        raise ConfigError(
            f"tensor_parallel_size: {count} GPUs are configured, but there are {there} usable ones from {first} on"
        )
    return gpus[:count]


def fewest_gpus(model: ModelConfig, dtype: torch.dtype, gpus: Sequence[torch.device], utilization: float) -> int:
    """Return the smallest number of GPUs that hold their ranks' weights and LEAST_ROOM.

    If no number is large enough, return the largest possible number. Only the counted GPUs are queried, because a query
    creates a CUDA context.
    """
    possible = [count for count in COUNTS if count <= len(gpus) and _can_be_split(model, count)]
    for count in possible:
        weights = model.spread_over(count).weight_bytes(dtype)
        budgets = (Budget.measure(gpu, utilization) for gpu in gpus[:count])
        if all(budget.left(weights) >= LEAST_ROOM * budget.ours for budget in budgets):
            return count
    return possible[-1]


def _can_be_split(model: ModelConfig, count: int) -> bool:
    try:
        model.spread_over(count)
    except ConfigError:
        return False
    return True
