"""Whether a model's 4-bit matrices are kept as floats as well, which steps of many tokens are faster with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.spec import MLPSpec
from aengine.runtime.startup.sizing.cuda_memory import Budget

MOST_COPIES = 1 / 8  # of what is left for keys and values


def with_copies(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, gpus: Sequence[torch.device]
) -> ModelConfig:
    """A dense model with copies where `config` leaves that and the size of the KV pool open and they are a small part
    of what each GPU has left, otherwise the model as it is. One that is to sleep would take them along.
    """
    sized = config.num_pages is not None or config.kv_cache_gib is not None
    dense = all(isinstance(layer.ffn, MLPSpec) for layer in model.layers)
    if config.unpacked_copies is not None or sized or config.sleep_mode:
        return model
    if not (model.int4 and dense) or dtype == torch.float32:
        return model
    copied, weights = model.with_unpacked_copies(), model.weight_bytes(dtype)
    more = copied.weight_bytes(dtype) - weights
    budgets = (Budget.of(gpu, config.gpu_memory_utilization) for gpu in gpus)
    return copied if all(more <= MOST_COPIES * budget.left(weights) for budget in budgets) else model
