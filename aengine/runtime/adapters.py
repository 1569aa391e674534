"""The adapters that a runtime has on its device: how they are read, and how they get there while steps run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from aengine.model.lora.linears import Linears
from aengine.model.lora.memory import Adapter, AdapterMemory, FactorCopy
from aengine.model.lora.read import read_adapter


class AdapterPlaces(Protocol):
    """Memory for some adapters on every rank; rows of a step name theirs by its place (`NewRow.adapter`)."""

    count: int  # of places, which are numbered from 1
    max_rank: int  # of an adapter

    def read(self, folder: Path) -> Adapter:
        """An adapter out of a PEFT folder, into host memory. Blocks for as long as that takes, in any thread.

        Raises `AdapterError`, which names the field or the tensor, where it cannot be applied exactly.
        """
        ...

    def rebase(self, base: Path) -> None:
        """The base's weights are those of this folder now, with which adapters that come are compared."""
        ...

    async def put(self, adapter: Adapter, place: int) -> None:
        """Fill a place on every rank; every step launched from then on sees it. One at a time.

        No step that is on its way may name the place. One that is cancelled is still copied to its end.
        """
        ...

    def close(self) -> None:
        """Wait for what is still being copied. To be called before the runner is closed."""
        ...


class Filler(Protocol):
    """Copies into the memory of one rank's places."""

    def fill(self, filling: FactorCopy) -> None:
        """Copy, or enqueue it, beside steps that are running. The values may be used up once `wait` has returned."""
        ...

    def wait(self) -> None:
        """Block until all that was enqueued has arrived."""
        ...


class HostFiller:
    """On a CPU, where a copy has happened when the call returns."""

    def fill(self, filling: FactorCopy) -> None:
        rows, columns = filling.values.shape
        filling.into.zero_()[:rows, :columns].copy_(filling.values)

    def wait(self) -> None:
        """There is nothing to wait for."""


class RankedPlaces:
    """`AdapterPlaces` of a model on one rank or several: one thread fills them, an adapter after the other."""

    def __init__(
        self,
        memories: Sequence[AdapterMemory],
        fillers: Sequence[Filler],
        dtype: torch.dtype,
        base: Path | None = None,
    ) -> None:
        """memories, fillers: of each rank; dtype: of the model; base: the folder of its weights; None: random ones."""
        self._base = base
        self._memories = memories
        self._fillers = fillers
        self._dtype = dtype
        self._linears = Linears(memories[0])
        self._room = memories[0].room
        self.count = self._room.places
        self.max_rank = self._room.rank
        # A thread that is given up goes on to the end of its adapter, and only then is the next one copied.
        self._worker = ThreadPoolExecutor(1, "aengine-adapters", torch.set_num_threads, (1,))

    def read(self, folder: Path) -> Adapter:
        return read_adapter(folder, self._linears, self._room, self._dtype, self._base)

    def rebase(self, base: Path) -> None:
        self._base = base

    async def put(self, adapter: Adapter, place: int) -> None:
        if not 1 <= place <= self.count:
            raise ValueError(f"there is no place {place}, only 1 to {self.count}")
        await asyncio.get_running_loop().run_in_executor(self._worker, self.fill, adapter, place)

    @torch.inference_mode()
    def fill(self, adapter: Adapter, place: int) -> None:
        """`put`, blocking."""
        for memory, filler in zip(self._memories, self._fillers, strict=True):
            for filling in memory.copies(adapter, place):
                filler.fill(filling)
        for filler in self._fillers:
            filler.wait()

    def close(self) -> None:
        """Wait for what is still being copied."""
        self._worker.shutdown(wait=True)
