"""Loads a model on one device, as most tests need it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from aengine.attention.base import AttentionBackend
from aengine.kernels.base import Kernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import Placement, load_shards


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    attention: AttentionBackend,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: bool = False,
    max_positions: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """Like load_shards(), for a model on one device."""
    [decoder] = load_shards(
        folder,
        config,
        [Placement(device, kernels, attention)],
        dtype=dtype,
        load_format=load_format,
        seed=seed,
        progress=progress,
        max_positions=max_positions,
        kv_dtype=kv_dtype,
    )
    return decoder
