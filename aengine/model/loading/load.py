"""Builds decoders, and fills them with a checkpoint's weights or with random ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch

from aengine.attention.base import AttentionBackend
from aengine.attention.torch_backend import TorchAttention
from aengine.errors import WeightsError
from aengine.kernels.base import Kernels
from aengine.kernels.collective.base import Collective
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.checkpoint.foreign import refuse_layout, with_mlx_hint
from aengine.model.checkpoint.staging import WeightsDigest
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import Group, needed
from aengine.model.lora.linears import Linears
from aengine.model.lora.room import LoraRoom

# Fields of `ModelConfig` that do not come from the checkpoint.
_OF_THE_DEVICE = ("ranks", "lora", "unpacked_copies", "drafting", "added_head", "sees")
_OF_THE_HEAD = ("mtp", "lacks_mtp")  # fields that describe a draft head, which may not be loaded
_OF_THE_TOWER = ("images", "no_images")  # likewise
_CONVERTED = ("dtype",)  # fields that may differ, because weights are converted while they are read


def adaptable_linears(config: ModelConfig) -> Linears:
    """Return the linears that adapters can change in the model. No memory is allocated for them."""
    room = LoraRoom(places=0, rank=1, kinds=())
    memory = Decoder(config.with_lora(room), TorchKernels(), TorchAttention()).adapters
    if memory is None:
        raise RuntimeError("a decoder with room for adapters has none")
    return Linears(memory)


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of a model or of one rank, and the kernels and collectives that compute there."""

    device: torch.device
    kernels: Kernels
    attention: AttentionBackend
    ranks: Collective | None = None  # None: one device holds the model


def open_checkpoint(folder: Path, whole: Decoder) -> Checkpoint:
    """Return the weights in `folder`, matched to a decoder that one device holds. Reads headers only.

    Raises `WeightsError`. Raises `UnsupportedModelError` for weights in another known layout.
    """
    config = whole.config
    try:
        return Checkpoint(folder, whole.groups, config.tie_word_embeddings, config.unread_prefixes)
    except WeightsError as error:
        refuse_layout(folder)
        raise with_mlx_hint(folder, error) from None


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
    first_kv_layer: int = 0,
) -> list[Decoder]:
    """Build a decoder, or a rank's part of it, for each placement, and fill it. Does blocking I/O.

    With `config.drafting`, each decoder has a draft head, which is filled, too.

    load_format: "auto" reads `folder`, each tensor once. "dummy" means random weights.
    max_positions: rows of the rotary table. None: all positions of the model.
    kv_dtype: the dtype of the KV pool. None: `dtype`.
    digest: gets all weights that are read.
    first_kv_layer: as in `Decoder`.
    Raises `WeightsError`.
    """
    if load_format == "auto":  # a checkpoint that does not fit is refused before memory is allocated
        checkpoint = open_checkpoint(folder, Decoder(config, placements[0].kernels, placements[0].attention))
    decoders = [
        Decoder(
            config, one.kernels, one.attention, dtype, one.device, max_positions, kv_dtype, one.ranks, first_kv_layer
        )
        for one in placements
    ]
    if load_format == "auto":
        checkpoint.copy_into([decoder.groups for decoder in decoders], progress, digest)
    else:
        for decoder in decoders:
            fill_random(decoder.groups, decoder.device, seed)
    return decoders


def fill_random(groups: Iterable[Group], device: torch.device, seed: int) -> None:
    """Fill every parameter with random values, on its device.

    Matrices get a normal distribution with variance 1 / inputs. Norms become 1, and biases 0.

    The same seed gives the same weights on the same kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for group in groups:
        entries = group.entries
        # It is quicker to fill experts in one tensor.
        transposed = {entry.transposed_as for entry in entries.values()}
        whole = {name for name, entry in entries.items() if entry.replaces and name not in transposed}
        covered = {name for entry in entries.values() for name in entry.replaces}
        names = [name for name in (whole | set(needed(entries))) if name not in covered]
        places = group.open(names)
        for name in sorted(names):
            place = places[name]
            if (value := entries[name].random_value) is not None:
                place.fill_(value)
            elif place.dtype == torch.float8_e4m3fn:
                for part in place.view(-1).split(2**24):  # torch cannot draw such numbers
                    part.copy_(torch.empty_like(part, dtype=torch.float32).normal_(0.0, 4.0, generator=generator))
            elif not place.is_floating_point():
                place.random_(generator=generator)
            elif "scale" in name:
                place.fill_(2.0**-8)  # the numbers that it scales are about 4
            elif place.dim() > 1:
                place.normal_(0.0, place.shape[-1] ** -0.5, generator=generator)
            else:
                place.fill_(0.0 if name.endswith(".bias") else 1.0)
        group.close()


def matching_checkpoint(folder: Path, model: ModelConfig, loaded: ModelConfig) -> Checkpoint:
    """Return the weights in `folder`, which can replace those of the loaded model. Reads headers only.

    model: the configuration in the folder's config.json. loaded: that of the loaded model.

    Raises `WeightsError` if the models differ or the weights do not fit. The error names the first difference.
    """
    skipped = (*_OF_THE_DEVICE, *_CONVERTED, *_OF_THE_HEAD, *_OF_THE_TOWER)
    _refuse_difference(folder, model, loaded, [name for name in model.__struct_fields__ if name not in skipped])
    if loaded.drafting and model.mtp is None:
        raise WeightsError(
            f"{folder}: {model.no_drafting}; the loaded model drafts with one. Start the engine with speculation off"
        )
    if loaded.sees and model.images is None:
        raise WeightsError(f"{folder}: the loaded model takes images, this one none: {model.no_images}")
    if loaded.drafting:
        _refuse_difference(folder, model, loaded, _OF_THE_HEAD)
    if loaded.sees:
        _refuse_difference(folder, model, loaded, _OF_THE_TOWER)
    plain = msgspec.structs.replace(loaded, lora=None)
    return open_checkpoint(folder, Decoder(plain, TorchKernels(), TorchAttention()))


def _refuse_difference(folder: Path, model: ModelConfig, loaded: ModelConfig, names: Iterable[str]) -> None:
    """Raise `WeightsError` if one of these settings differs."""
    for name in names:
        old, new = getattr(loaded, name), getattr(model, name)
        if old != new:
            raise WeightsError(
                f"{folder / 'config.json'}: {name} is {_shown(new)}, that of the loaded model {_shown(old)}; weights "
                f"are reloaded for the same model alone, another one needs another engine"
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
