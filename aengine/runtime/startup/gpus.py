"""Which GPUs a model is spread over."""

from __future__ import annotations

import torch

from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.runtime.startup.cuda_memory import Budget

COUNTS = (1, 2, 4, 8)
LEAST_ROOM = 0.1  # of what the engine may use: beside the weights, for keys, values and a step


def choose_gpus(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, first: torch.device
) -> list[torch.device]:
    """As many as `config` asks for, or as few as hold the model, from `first` on. Raises `ConfigError`."""
    there = torch.cuda.device_count() - (first.index or 0)
    if config.tensor_parallel_size == "auto":
        count = fewest(model, dtype, Budget.of(first, config.gpu_memory_utilization), there)
    else:
        count = int(config.tensor_parallel_size)
    if count > there:
        raise ConfigError(
            f"tensor_parallel_size: {count} GPUs were asked for, from {first} on this machine has {there} usable ones"
        )
    return [first, *(torch.device("cuda", (first.index or 0) + rank) for rank in range(1, count))]


def fewest(model: ModelConfig, dtype: torch.dtype, budget: Budget, there: int) -> int:
    """The smallest number of GPUs whose memory holds the weights with some room; the largest possible if none does."""
    possible = [count for count in COUNTS if count <= there and _can_be_dealt_out(model, count)]
    for count in possible:
        if budget.left(model.over(count).weight_bytes(dtype)) >= LEAST_ROOM * budget.ours:
            return count
    return possible[-1]


def _can_be_dealt_out(model: ModelConfig, count: int) -> bool:
    try:
        model.over(count)
    except ConfigError:
        return False
    return True
