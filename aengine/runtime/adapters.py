"""The adapters that a runtime has on its device: how they are read, and how they get there while steps run."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from aengine.model.lora.adapter import Adapter


class AdapterPlaces(Protocol):
    """Memory for some adapters on every rank; rows of a step name theirs by its place (`NewRow.adapter`)."""

    count: int  # of places, which are numbered from 1
    max_rank: int  # of an adapter

    def read(self, folder: Path) -> Adapter:
        """An adapter out of a PEFT folder, into host memory. Blocks for as long as that takes, in any thread.

        Raises `AdapterError`, which names the field or the tensor, where it cannot be applied exactly.
        """
        ...

    async def put(self, adapter: Adapter, place: int) -> None:
        """Fill a place on every rank; every step launched from then on sees it. One at a time.

        No step that is on its way may name the place.
        """
        ...
