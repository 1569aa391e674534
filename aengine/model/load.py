"""From a checkpoint folder to a decoder with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from aengine.attention.base import AttentionBackend
from aengine.kernels.base import Kernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.dummy import fill_random
from aengine.model.weights import Checkpoint


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
) -> Decoder:
    """Build the decoder that `config` describes on `device` and fill it, from `folder` or with random weights.

    Blocks for as long as reading takes. `max_positions` bounds the rotary table (None: all the model's
    positions). Raises `WeightsError`.
    """

    def build() -> Decoder:
        return Decoder(config, kernels, attention, dtype, device, max_positions)

    if load_format == "dummy":
        decoder = build()
        fill_random(decoder, seed)
    else:
        shapes = {name: view.shape for name, view in Decoder(config, kernels, attention).weights.items()}
        checkpoint = Checkpoint(folder, shapes, config.tie_word_embeddings)
        decoder = build()
        checkpoint.copy_into(decoder.weights, progress)
    decoder.pack()
    return decoder
