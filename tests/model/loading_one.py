"""Loads a model on one device, as most tests need it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from aengine.attention.base import AttentionBackend
from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.base import Kernels
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import Placement, load_shards

CPU = torch.device("cpu")


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
    attention: AttentionBackend | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: bool = False,
    max_positions: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """Like load_shards(), for a model on one device. By default with torch's kernels, in float32 on the CPU."""
    [decoder] = load_shards(
        folder,
        config,
        [Placement(device, kernels or TorchKernels(), attention or TorchAttention())],
        dtype=dtype,
        load_format=load_format,
        seed=seed,
        progress=progress,
        max_positions=max_positions,
        kv_dtype=kv_dtype,
    )
    return decoder
