"""Device memory whose addresses stay reserved while the memory itself is freed and mapped again.

Captured graphs hold the addresses of weights and pages. The driver's cuMem* calls reserve addresses and map memory to
them separately, so memory that is mapped again has the addresses it had before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aengine.errors import EngineFailedError

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # the driver's constants for memory type, location and access


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver:
    """The calls of CUDA's driver that `VirtualMemory` needs. They raise EngineFailedError or OutOfMemoryError."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")

    def granularity(self, device: int) -> int:
        """Return a number of bytes. Every size must be a multiple of it."""
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(_properties(device)), 0)
        return size.value

    def reserve(self, size: int) -> int:
        """Reserve addresses without memory."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(size), _size(0), _address(0), _address(0))
        return address.value

    def release_addresses(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", _address(address), _size(size))

    def map(self, address: int, size: int, device: int) -> None:
        """Map new memory to reserved addresses. Its contents are undefined."""
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(_properties(device)), _address(0))
        try:
            self._call("cuMemMap", _address(address), _size(size), _size(0), handle, _address(0))
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", _address(address), _size(size), ctypes.byref(access), _size(1))

    def unmap(self, address: int, size: int) -> None:
        """Free the memory. Its addresses stay reserved."""
        self._call("cuMemUnmap", _address(address), _size(size))

    def pin(self, address: int, size: int) -> None:
        """Pin host memory, so that the device can copy from and to it."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), _size(size), 0)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy_out(self, host: int, address: int, size: int, stream: int) -> None:
        """Enqueue a copy from the device to the host."""
        self._call(
            "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), _address(address), _size(size), ctypes.c_void_p(stream)
        )

    def copy_in(self, address: int, host: int, size: int, stream: int) -> None:
        """Enqueue a copy from the host to the device."""
        self._call(
            "cuMemcpyHtoDAsync_v2", _address(address), ctypes.c_void_p(host), _size(size), ctypes.c_void_p(stream)
        )

    def clear(self, address: int, size: int, stream: int) -> None:
        """Enqueue a fill with zeros."""
        self._call("cuMemsetD8Async", _address(address), ctypes.c_ubyte(0), _size(size), ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 2:
            raise torch.OutOfMemoryError(f"{name}: the device has not enough free memory")
        if code:
            raise EngineFailedError(f"the device refused {name} with CUDA's error {code}")


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, location=_Location(_ON_DEVICE, device))


def _size(size: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(size)


def _address(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)


@dataclass(slots=True)
class MemoryBlock:
    """A range of addresses on one device."""

    address: int
    size: int
    device: int
    mapped: bool = True


class VirtualMemory:
    """Allocates blocks of device memory that can be unmapped and mapped again."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._blocks: dict[int, MemoryBlock] = {}  # by address

    @property
    def blocks(self) -> Sequence[MemoryBlock]:
        """All allocated blocks, in no order."""
        return list(self._blocks.values())

    def allocate(self, size: int, device: int) -> int:
        """Return the address of a new block. Raises: OutOfMemoryError."""
        unit = self._driver.granularity(device)
        size = -(-size // unit) * unit
        address = self._driver.reserve(size)
        try:
            self._driver.map(address, size, device)
        except BaseException:
            self._driver.release_addresses(address, size)
            raise
        self._blocks[address] = MemoryBlock(address, size, device)
        return address

    def free(self, address: int) -> None:
        """Free a block, mapped or not."""
        block = self._blocks.pop(address)
        self.unmap([block])
        self._driver.release_addresses(block.address, block.size)

    def unmap(self, blocks: Sequence[MemoryBlock]) -> None:
        """Free the memory of blocks. Nothing may use it any more."""
        for block in blocks:
            if block.mapped:
                self._driver.unmap(block.address, block.size)
                block.mapped = False

    def map(self, blocks: Sequence[MemoryBlock]) -> None:
        """Map memory to all of the blocks, or to none of them. Raises: OutOfMemoryError."""
        new: list[MemoryBlock] = []
        try:
            for block in blocks:
                if not block.mapped:
                    self._driver.map(block.address, block.size, block.device)
                    block.mapped = True
                    new.append(block)
        except BaseException:
            self.unmap(new)
            raise
