"""Adapters on the device: how they are read, and how they are copied there while steps run."""

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


class Filler(Protocol):
    """Copies adapters into the places of one rank."""

    def fill(self, filling: FactorCopy) -> None:
        """Copy values now, or enqueue their copy. Steps may run meanwhile.

        The caller may not change the values until `wait` returns.
        """
        ...

    def wait(self) -> None:
        """Block until every enqueued copy is complete."""
        ...


class HostFiller:
    """`Filler` on a CPU. A copy is complete when the call returns."""

    def fill(self, filling: FactorCopy) -> None:
        rows, columns = filling.values.shape
        filling.into.zero_()[:rows, :columns].copy_(filling.values)

    def wait(self) -> None:
        """Return at once: copies are synchronous here."""


class AdapterPlaces:
    """Memory for a fixed number of adapters on every rank. A row names its adapter by place (`NewRow.adapter`).

    One thread fills the places, one adapter after another.
    """

    def __init__(
        self,
        memories: Sequence[AdapterMemory],
        fillers: Sequence[Filler],
        dtype: torch.dtype,
        base: Path | None = None,
    ) -> None:
        """Args:
        memories: One for each rank.
        fillers: One for each rank.
        dtype: The model's.
        base: The folder of the base model's weights. None: they are random.
        """
        self._base = base
        self._memories = memories
        self._fillers = fillers
        self._dtype = dtype
        self._linears = Linears(memories[0])
        self._room = memories[0].room
        self.count = self._room.places  # numbered from 1
        # When a caller is cancelled, the thread still finishes its adapter before it starts the next one.
        self._worker = ThreadPoolExecutor(1, "aengine-adapters", torch.set_num_threads, (1,))

    def read(self, folder: Path) -> Adapter:
        """Read an adapter from a PEFT folder into host memory. Does blocking I/O; any thread may call it.

        Raises: AdapterError if it cannot be applied exactly. The error names the field or the tensor.
        """
        return read_adapter(folder, self._linears, self._room, self._dtype, self._base)

    def rebase(self, base: Path) -> None:
        """Set the folder of the base model's weights. Adapters that are read later are compared with these weights."""
        self._base = base

    async def put(self, adapter: Adapter, place: int) -> None:
        """Copy an adapter into a place on every rank. Steps launched after the call returns use it.

        Only one call may be active. No step in flight may use the place. Cancelling the call does not stop the copy.
        """
        if not 1 <= place <= self.count:
            raise ValueError(f"there is no place {place}, only 1 to {self.count}")
        await asyncio.get_running_loop().run_in_executor(self._worker, self.fill, adapter, place)

    @torch.inference_mode()
    def fill(self, adapter: Adapter, place: int) -> None:
        """Like `put`, but blocks."""
        for memory, filler in zip(self._memories, self._fillers, strict=True):
            for filling in memory.copies(adapter, place):
                filler.fill(filling)
        for filler in self._fillers:
            filler.wait()

    def close(self) -> None:
        """Wait for copies in progress. Call it before the runner is closed."""
        self._worker.shutdown(wait=True)
