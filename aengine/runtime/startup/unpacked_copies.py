"""Decides whether a device also keeps copies of 4-bit matrices as floats. They make steps of many tokens faster."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.spec.feed_forward import MLPSpec
from aengine.runtime.startup.sizing.cuda_memory import Budget

MOST_COPIES = 1 / 8  # of the memory that is left for keys and values


def with_copies(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, gpus: Sequence[torch.device]
) -> ModelConfig:
    """Return the model's configuration, with copies if they are worth their memory.

    A dense model gets copies if they take at most MOST_COPIES of the memory left on each GPU. It gets none if a knob
    sets copies or the size of the KV pool, or turns sleep mode on: sleep would have to move the copies.
    """
    sized = config.num_pages is not None or config.kv_cache_gib is not None
    dense = all(isinstance(layer.ffn, MLPSpec | None) for layer in model.layers)
    if config.unpacked_copies is not None or sized or config.sleep_mode:
        return model
    if not (model.has_4_bits and dense) or dtype == torch.float32:
        return model
    copied, weights = model.with_unpacked_copies(), model.weight_bytes(dtype)
    more = copied.weight_bytes(dtype) - weights
    budgets = (Budget.measure(gpu, config.gpu_memory_utilization) for gpu in gpus)
    return copied if all(more <= MOST_COPIES * budget.left(weights) for budget in budgets) else model
