"""From a checkpoint folder to a decoder with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from aengine.attention.base import AttentionBackend
from aengine.kernels.base import Kernels
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.dummy import fill_random


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
    """Build the decoder that `config` describes on `device` and fill it, from `folder` or with random weights.

    Blocks for as long as reading takes. `max_positions` bounds the rotary table (None: all the model's
    positions). kv_dtype: of the KV pool (None: `dtype`). Raises `WeightsError`.
    """
    if load_format == "auto":  # a checkpoint that does not fit is refused before any memory is taken
        checkpoint = Checkpoint(folder, Decoder(config, kernels, attention).groups, config.tie_word_embeddings)
    decoder = Decoder(config, kernels, attention, dtype, device, max_positions, kv_dtype)
    if load_format == "auto":
        checkpoint.copy_into(decoder.groups, progress)
    else:
        fill_random(decoder, seed)
    return decoder
