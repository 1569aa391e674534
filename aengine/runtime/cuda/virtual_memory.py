"""Memory of CUDA devices whose addresses stay while what lies behind them comes and goes.

Captured graphs hold the addresses of weights and pages. The driver reserves addresses and maps memory behind them
apart from each other (cuMem*, of which torch has its own use): what is unmapped and mapped again is where it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aengine.errors import EngineFailedError

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # the driver's names for kinds of memory, of places, of access


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
    """CUDA's driver: the calls that `VirtualMemory` needs. All raise `EngineFailedError`, or `OutOfMemoryError`."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")

    def granularity(self, device: int) -> int:
        """Sizes are multiples of it."""
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(_properties(device)), 0)
        return size.value

    def reserve(self, size: int) -> int:
        """Addresses, with nothing behind them."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(size), _size(0), _address(0), _address(0))
        return address.value

    def release_addresses(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", _address(address), _size(size))

    def map(self, address: int, size: int, device: int) -> None:
        """Put new memory behind reserved addresses, of which nothing is known."""
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(_properties(device)), _address(0))
        try:
            self._call("cuMemMap", _address(address), _size(size), _size(0), handle, _address(0))
        finally:
            self._call("cuMemRelease", handle)  # it lives on behind its addresses
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", _address(address), _size(size), ctypes.byref(access), _size(1))

    def unmap(self, address: int, size: int) -> None:
        """Give back the memory behind the addresses, which stay reserved."""
        self._call("cuMemUnmap", _address(address), _size(size))

    def pin(self, address: int, size: int) -> None:
        """Keep host memory where it is, so that the device copies from and to it by itself."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), _size(size), 0)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy_out(self, host: int, address: int, size: int, stream: int) -> None:
        """Enqueue a copy to the host."""
        self._call(
            "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), _address(address), _size(size), ctypes.c_void_p(stream)
        )

    def copy_in(self, address: int, host: int, size: int, stream: int) -> None:
        """Enqueue a copy from the host."""
        self._call(
            "cuMemcpyHtoDAsync_v2", _address(address), ctypes.c_void_p(host), _size(size), ctypes.c_void_p(stream)
        )

    def clear(self, address: int, size: int, stream: int) -> None:
        """Enqueue zeros."""
        self._call("cuMemsetD8Async", _address(address), ctypes.c_ubyte(0), _size(size), ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 2:
            raise torch.OutOfMemoryError(f"{name}: the device has no such memory left")
        if code:
            raise EngineFailedError(f"the device refused {name} with CUDA's error {code}")


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, location=_Location(_ON_DEVICE, device))


def _size(size: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(size)


def _address(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)


@dataclass(slots=True)
class Block:
    """Some addresses of one device."""

    address: int
    size: int
    device: int
    mapped: bool = True


class VirtualMemory:
    """Blocks of device memory, handed out with memory behind them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._blocks: dict[int, Block] = {}  # by address

    @property
    def blocks(self) -> Sequence[Block]:
        """Those that are handed out, in no order."""
        return list(self._blocks.values())

    def allocate(self, size: int, device: int) -> int:
        """The address of a new block. Raises `OutOfMemoryError`."""
        unit = self._driver.granularity(device)
        size = -(-size // unit) * unit
        address = self._driver.reserve(size)
        try:
            self._driver.map(address, size, device)
        except BaseException:
            self._driver.release_addresses(address, size)
            raise
        self._blocks[address] = Block(address, size, device)
        return address

    def free(self, address: int) -> None:
        """Give a block back, whether or not there is memory behind it."""
        block = self._blocks.pop(address)
        self.unmap([block])
        self._driver.release_addresses(block.address, block.size)

    def unmap(self, blocks: Sequence[Block]) -> None:
        """Give back the memory behind blocks. Nothing may be using it any more."""
        for block in blocks:
            if block.mapped:
                self._driver.unmap(block.address, block.size)
                block.mapped = False

    def map(self, blocks: Sequence[Block]) -> None:
        """Put memory behind blocks again, behind all of them or none. Raises `OutOfMemoryError`."""
        new: list[Block] = []
        try:
            for block in blocks:
                if not block.mapped:
                    self._driver.map(block.address, block.size, block.device)
                    block.mapped = True
                    new.append(block)
        except BaseException:
            self.unmap(new)
            raise
