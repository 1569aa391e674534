"""Sizes the memory for adapters at start-up, from the configured adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from aengine.errors import AdapterError
from aengine.model.lora.linears import Linears
from aengine.model.lora.read import kinds_of
from aengine.model.lora.room import EXPERTS, LoraRoom, kind_of

LEAST_RANK = 16
# Few adapters change these linears. Memory is allocated only if a configured adapter changes them.
RARE = {"mlp.shared_expert_gate"}


def survey(
    folders: Mapping[str, Path],
    linears: Linears,
    places: int,
    max_rank: int | None,
    loading: bool,
) -> LoraRoom:
    """Return the size of the memory for `places` adapters.

    folders: of the configured adapters, by name.
    max_rank: None means the highest rank of the configured adapters.
    loading: whether more adapters may be loaded later. They may change any linear of the layers.
    Raises `AdapterError`, naming the adapter.
    """
    rank, kinds = LEAST_RANK, set[str]()
    of_experts = {kind_of(site) for site in linears.sites if EXPERTS in site}
    for name, folder in folders.items():
        try:
            own, changed = kinds_of(folder, linears)
        except AdapterError as error:
            raise AdapterError(f"lora: {name}: {error}") from None
        rank = max(rank, own)
        kinds |= changed
    if kinds & of_experts:  # memory is for both linears of experts, or for none
        kinds |= of_experts
    if loading:
        kinds |= {kind_of(site) for site in linears.sites if site.startswith("model.layers.")} - RARE - of_experts
    room = LoraRoom(places=places, rank=max_rank or rank, kinds=tuple(sorted(kinds)))
    numbers = sum(
        room.kept_rank * (part.inputs + part.outputs)
        for name, site in linears.sites.items()
        for part in site.parts.values()
        if kind_of(name) in kinds
    )
    return msgspec.structs.replace(room, numbers=numbers)
