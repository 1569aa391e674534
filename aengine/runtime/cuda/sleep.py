"""Weights and KV pools in device memory that can be freed and mapped again at the addresses that graphs use."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from aengine.runtime.cuda.virtual_memory import Driver, MemoryBlock, VirtualMemory

log = logging.getLogger("aengine")

_ALLOCATING_THREADS = 8  # the system needs longer to allocate host memory than the device needs to copy
_ADVICE = (14, 23)  # MADV_HUGEPAGE and MADV_POPULATE_WRITE
_LIBC = ctypes.CDLL(None)


class Pools:
    """Memory pools of torch over `VirtualMemory`, one on each device.

    Tensors that the calling thread allocates within `use` come from these pools. Torch calls the allocator while it
    holds its lock, so no other thread may free CUDA tensors of the device meanwhile. `close` frees all unused memory.
    """

    def __init__(self, devices: Sequence[torch.device], memory: VirtualMemory) -> None:
        self._memory = memory
        allocator = _allocator(memory)
        self._pools: dict[torch.device, torch.cuda.MemPool] = {}
        for device in devices:
            with torch.cuda.device(device):
                self._pools[device] = torch.cuda.MemPool(allocator)

    @contextmanager
    def use(self, *devices: torch.device) -> Iterator[None]:
        """Allocate from the pools of these devices within the block. Without arguments: from all pools."""
        with ExitStack() as stack:
            for device in devices or self._pools:
                stack.enter_context(torch.cuda.use_mem_pool(self._pools[device], device))
            yield

    def trim(self) -> None:
        """Free the memory that no tensor uses. No allocation may follow."""
        used = {
            segment["address"]
            for pool in self._pools.values()
            for segment in pool.snapshot()
            if segment["allocated_size"]
        }
        self._memory.unmap([block for block in self._memory.blocks if block.address not in used])

    def close(self) -> None:
        self._pools.clear()


def _allocator(memory: VirtualMemory) -> Any:
    """Return a torch allocator that calls `memory` through two C functions."""

    def allocate(size: int, device: int, _stream: int | None) -> int | None:
        try:
            return memory.allocate(size, device)
        except Exception as error:  # noqa: BLE001 - C code calls this; torch raises for a null pointer
            log.warning("memory for sleep mode could not be allocated: %s", error)
            return None

    def free(address: int, _size: int, _device: int, _stream: int | None) -> None:
        try:
            memory.free(address)
        except Exception as error:  # noqa: BLE001 - the device is lost, or the process ends
            log.debug("memory was not freed: %s", error)

    c_allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(allocate)
    c_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(free)
    pointers = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (c_allocate, c_free)]
    made = torch._C._cuda_customAllocator(*pointers)
    for kept in (c_allocate, c_free, made):  # torch may call them until the process ends
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return made


@dataclass(slots=True)
class _Copy:
    """A block's contents in pinned host memory."""

    block: MemoryBlock
    memory: mmap.mmap
    address: int


class CudaSleep:
    """`SleepableMemory` on CUDA devices."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._driver = Driver()
        self._devices = devices
        self._weights = VirtualMemory(self._driver)
        self._kv = VirtualMemory(self._driver)
        self.weights = Pools(devices, self._weights)  # for everything a loaded model holds
        self.kv = Pools(devices, self._kv)  # for keys and values
        self._copies: list[_Copy] = []

    def sleep(self) -> None:
        self._wait()
        streams = self._streams()
        blocks = [block for block in self._weights.blocks if block.mapped]
        try:
            with ThreadPoolExecutor(_ALLOCATING_THREADS, "aengine-sleep") as workers:
                for copy in workers.map(_host_memory, blocks):
                    block, address = copy.block, copy.address
                    self._driver.pin(address, block.size)
                    self._copies.append(copy)
                    with torch.cuda.device(block.device):
                        stream = streams[block.device].cuda_stream
                        self._driver.copy_out(address, block.address, block.size, stream)
            self._wait()
        except BaseException:
            self._wait()
            self._forget_copies()
            raise
        self._weights.unmap(blocks)
        self._kv.unmap(self._kv.blocks)
        torch.cuda.empty_cache()  # memory that steps used

    def wake(self) -> None:
        blocks = [copy.block for copy in self._copies]
        with torch.cuda.device(self._devices[0]):  # this thread may have no context yet
            torch.cuda.current_stream()
        self._weights.map(blocks)
        try:
            self._kv.map(self._kv.blocks)
        except BaseException:
            self._weights.unmap(blocks)
            raise
        streams = self._streams()
        for copy in self._copies:
            with torch.cuda.device(copy.block.device):
                stream = streams[copy.block.device].cuda_stream
                self._driver.copy_in(copy.block.address, copy.address, copy.block.size, stream)
        for block in self._kv.blocks:
            with torch.cuda.device(block.device):
                self._driver.clear(block.address, block.size, streams[block.device].cuda_stream)
        self._wait()
        self._forget_copies()

    def close(self) -> None:
        self._forget_copies()
        self.weights.close()
        self.kv.close()

    def _streams(self) -> dict[int | None, torch.cuda.Stream]:
        return {device.index: torch.cuda.Stream(device) for device in self._devices}

    def _wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

    def _forget_copies(self) -> None:
        for copy in self._copies:
            self._driver.unpin(copy.address)
        self._copies.clear()  # unmaps the memory


def _host_memory(block: MemoryBlock) -> _Copy:
    """Allocate and touch host memory for a block's contents, in huge pages if the system has them."""
    memory = mmap.mmap(-1, block.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for advice in _ADVICE:  # older systems refuse; pinning then touches the pages. mmap.madvise would hold the GIL.
        _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(block.size), advice)
    return _Copy(block, memory, address)
