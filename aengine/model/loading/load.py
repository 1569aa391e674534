"""From a checkpoint folder to a decoder with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from aengine.attention.base import AttentionBackend
from aengine.attention.torch_backend import TorchAttention
from aengine.errors import WeightsError
from aengine.kernels.base import Kernels
from aengine.kernels.collective.base import Collective
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.checkpoint.digest import WeightsDigest
from aengine.model.checkpoint.foreign import explained, refuse_layout
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.dummy import fill_random
from aengine.model.lora.linears import Linears
from aengine.model.lora.room import LoraRoom


def adaptable_linears(config: ModelConfig) -> Linears:
    """What adapters can change in the model that `config` describes. No memory is kept for any."""
    room = LoraRoom(places=0, rank=1, kinds=())
    memory = Decoder(config.with_room(room), TorchKernels(), TorchAttention()).adapters
    if memory is None:
        raise RuntimeError("a decoder with room for adapters has none")
    return Linears(memory)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model, or a rank's shard of it, is put, and what it computes with there."""

    device: torch.device
    kernels: Kernels
    attention: AttentionBackend
    ranks: Collective | None = None  # None: the model is here alone


def checkpoint_of(folder: Path, whole: Decoder) -> Checkpoint:
    """The weights in `folder`, matched to a decoder that is not spread over ranks. Reads headers only.

    Raises `WeightsError`, and `UnsupportedModelError` for weights in another layout that is known.
    """
    config = whole.config
    try:
        return Checkpoint(folder, whole.groups, config.tie_word_embeddings, config.aside)
    except WeightsError as error:
        refuse_layout(folder)
        raise explained(folder, error) from None


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
    """`load_shards` of a model that is whole in one place."""
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


def load_shards(
    folder: Path,
    config: ModelConfig,
    placements: Sequence[Placement],
    *,
    dtype: torch.dtype,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: bool = False,
    max_positions: int | None = None,
    kv_dtype: torch.dtype | None = None,
    digest: WeightsDigest | None = None,
) -> list[Decoder]:
    """Build the decoder that `config` describes, or a shard of it, in every place and fill it, as `load_format` says.

    From `folder`, of which every tensor is read once, or with random weights. Blocks for as long as reading takes.
    `max_positions` bounds the rotary table (None: all the model's positions). kv_dtype: of the KV pool (None:
    `dtype`). digest: gets all weights that are read. Raises `WeightsError`.
    """
    if load_format == "auto":  # a checkpoint that does not fit is refused before any memory is taken
        checkpoint = checkpoint_of(folder, Decoder(config, placements[0].kernels, placements[0].attention))
    decoders = [
        Decoder(config, one.kernels, one.attention, dtype, one.device, max_positions, kv_dtype, one.ranks)
        for one in placements
    ]
    if load_format == "auto":
        checkpoint.copy_into([decoder.groups for decoder in decoders], progress, digest)
    else:
        for decoder in decoders:
            fill_random(decoder, seed)
    return decoders
