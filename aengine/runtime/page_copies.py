"""Copies of KV pages between the pools of all ranks and host memory, made while steps run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol

import torch
from torch import Tensor

from aengine.cache.kv import KVPool, host_zeros


class Copier(Protocol):
    """Copies between the pool of one rank and its host memory, [slots, bytes of a page] uint8."""

    host: Tensor

    def to_host(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy, or enqueue it."""
        ...

    def to_device(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy, or enqueue it."""
        ...

    def wait(self, to_host: bool) -> None:
        """Block until the enqueued copies of one direction are complete. to_host: the direction."""
        ...

    def close(self) -> None:
        """Free the memory. No copy may follow."""
        ...


class HostCopier:
    """`Copier` on a CPU. A copy is complete when the call returns."""

    def __init__(self, kv: KVPool, slots: int) -> None:
        self._pages = kv.by_page()
        self.host = host_zeros((slots, kv.page_bytes), torch.uint8)
        widths = [kind[0].numel() for kind in self._pages]
        self._slots = [
            columns.unflatten(1, kind.shape[1:]) for columns, kind in zip(self.host.split(widths, dim=1), self._pages)
        ]

    def to_host(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        for kept, kind in zip(self._slots, self._pages):
            kept[torch.tensor(slots)] = kind[torch.tensor(pages)]

    def to_device(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        for kept, kind in zip(self._slots, self._pages):
            kind[torch.tensor(pages)] = kept[torch.tensor(slots)]

    def wait(self, to_host: bool) -> None:
        """Return at once: copies are synchronous here."""

    def close(self) -> None:
        """Do nothing: the memory goes with the tensor."""


class PageCopies:
    """Host memory for pages, and copies to and from the KV pools of all ranks. A slot holds one page.

    A thread for each direction enqueues the copies and waits for them. Copies cannot be cancelled.
    """

    def __init__(self, ranks: Sequence[Copier]) -> None:
        self._ranks = ranks
        self.slots = len(ranks[0].host)
        self.page_bytes = sum(rank.host.shape[1] for rank in ranks)  # of one page
        self._down = ThreadPoolExecutor(1, "aengine-pages-down", torch.set_num_threads, (1,))
        self._up = ThreadPoolExecutor(1, "aengine-pages-up", torch.set_num_threads, (1,))

    async def to_host(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages to slots. No step in flight may write these pages. Only one call may be active."""
        await asyncio.get_running_loop().run_in_executor(self._down, self.copy_to_host, pages, slots)

    async def to_device(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy slots to unused pages. Only one call may be active. Steps launched after it returns can use them."""
        await asyncio.get_running_loop().run_in_executor(self._up, self.copy_to_device, slots, pages)

    def copy_to_host(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Like `to_host`, but blocks."""
        with torch.inference_mode():
            for rank in self._ranks:
                rank.to_host(pages, slots)
            for rank in self._ranks:
                rank.wait(to_host=True)

    def copy_to_device(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Like `to_device`, but blocks."""
        with torch.inference_mode():
            for rank in self._ranks:
                rank.to_device(slots, pages)
            for rank in self._ranks:
                rank.wait(to_host=False)

    def memory(self, slot: int) -> list[memoryview]:
        """Return a slot's bytes, one view for each rank."""
        return [rank.host[slot].numpy().data for rank in self._ranks]

    def close(self) -> None:
        """Wait for copies in progress. Call it before the runner is closed."""
        self._up.shutdown(wait=True)
        self._down.shutdown(wait=True)
        with ExitStack() as stack:  # synchronising a lost device raises; the rest must still be closed
            for rank in self._ranks:
                stack.callback(rank.close)
            self._ranks = ()  # also drops the references to the pools
