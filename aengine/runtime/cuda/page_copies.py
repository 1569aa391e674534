"""Copies KV pages between a GPU and pinned host memory with the GPU's copy engines."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.errors import ConfigError, EngineFailedError

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
_MAX_PITCH = 2**31 - 1  # bytes between two rows of a copy
_HOST, _DEVICE = 1, 2  # CUmemorytype


class PinnedMemory:
    """Host memory that copy engines can read and write, in huge pages if the system has them.

    Allocating 4 GiB takes about a second, because the system clears the memory first.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises: ConfigError if the system refuses so much memory."""
        try:
            pages = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise ConfigError(
                f"host_cache_gib: {nbytes / 2**30:.1f} GiB cannot be allocated: {error.strerror}"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(pages, dtype=torch.uint8)  # [nbytes]; keeps the mapping
        self.data.zero_()
        code = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), nbytes, _PORTABLE))
        if code:
            raise ConfigError(
                f"host_cache_gib: {nbytes / 2**30:.1f} GiB cannot be pinned (CUDA error {code}); lower it, or raise "
                f"the limit of locked memory (ulimit -l)"
            )

    def close(self) -> None:
        """Free the memory. No copy may follow."""
        torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
        self.data = torch.empty(0, dtype=torch.uint8)


@contextmanager
def pin_in_thread(nbytes: int, devices: Sequence[torch.device]) -> Iterator[Callable[[], list[PinnedMemory]]]:
    """Allocate pinned memory for each device in a thread. Yield a function that waits for the memory and returns it.

    If the block raises, the memory is freed.
    """

    def pin(device: torch.device) -> PinnedMemory:
        with torch.cuda.device(device):  # a new thread would create a context on the default device
            return PinnedMemory(nbytes)

    with ThreadPoolExecutor(1, "aengine-pinning") as worker:
        futures = [worker.submit(pin, device) for device in devices] if nbytes else []
        try:
            yield lambda: [future.result() for future in futures]
        except BaseException:
            for future in futures:
                if not future.cancel() and future.exception() is None:
                    future.result().close()
            raise


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_void_p),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_void_p),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class DeviceCopier:
    """`Copier` of one GPU. A page is one strided copy, with one row for the keys or values of each layer.

    Copies run no kernel and take no device memory. They only share the bandwidth with steps. Each direction has its own
    stream. The host waits for these streams; the streams of steps do not.
    """

    def __init__(self, kv: KVPool, memory: PinnedMemory, slots: int) -> None:
        self._kv = kv
        self._memory = memory
        self.host: Tensor = memory.data[: slots * kv.page_bytes].view(slots, kv.page_bytes)
        self._device = kv.data.device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        with torch.cuda.device(self._device):
            self._down, self._up = torch.cuda.Stream(), torch.cuda.Stream()
            self._ended = {stream: torch.cuda.Event(blocking=True) for stream in (self._down, self._up)}

    def to_host(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        self._copy(pages, slots, to_host=True)

    def to_device(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        self._copy(pages, slots, to_host=False)

    def wait(self, to_host: bool) -> None:
        stream = self._down if to_host else self._up
        ended = self._ended[stream]
        ended.record(stream)
        ended.synchronize()

    def close(self) -> None:
        try:
            with torch.cuda.device(self._device):
                self._down.synchronize()
                self._up.synchronize()
        finally:
            self.host = torch.empty(0, dtype=torch.uint8)
            self._memory.close()

    def _copy(self, pages: Sequence[int], slots: Sequence[int], to_host: bool) -> None:
        at = self.host.data_ptr()
        with torch.cuda.device(self._device):
            for by_page in self._kv.by_page():
                self._copy_kind(by_page, at, pages, slots, to_host)
                at += by_page[0].numel()

    def _copy_kind(self, by_page: Tensor, host: int, pages: Sequence[int], slots: Sequence[int], to_host: bool) -> None:
        """Enqueue the copies of one tensor of the pool.

        by_page: [pages, rows, width] uint8. host: the address of this tensor's bytes in the first slot.
        """
        _, rows, width = by_page.shape
        pool, pitch = by_page.data_ptr(), by_page.stride(1)
        stream = (self._down if to_host else self._up).cuda_stream
        # If the rows are too far apart for one copy, each row is copied separately.
        height = rows if pitch <= _MAX_PITCH else 1
        copy = _Copy(width=width, height=height)
        if to_host:
            copy.src_type, copy.src_pitch, copy.dst_type, copy.dst_pitch = _DEVICE, min(pitch, _MAX_PITCH), _HOST, width
        else:
            copy.src_type, copy.src_pitch, copy.dst_type, copy.dst_pitch = _HOST, width, _DEVICE, min(pitch, _MAX_PITCH)
        for page, slot in zip(pages, slots, strict=True):
            for row in range(0, rows, height):
                on_device = pool + row * pitch + page * width
                on_host = host + slot * self._kv.page_bytes + row * width
                if to_host:
                    copy.src_device, copy.dst_host = on_device, on_host
                else:
                    copy.src_host, copy.dst_device = on_host, on_device
                code = self._driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), stream)
                if code:
                    raise EngineFailedError(f"cuMemcpy2DAsync returned CUDA error {code}")
