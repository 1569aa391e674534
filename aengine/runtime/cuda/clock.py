"""Awaits CUDA events on the event loop, without an extra thread and without polling.

A side stream waits for the event and then calls a host function: libc's `fflush`, on a FILE over a pipe. The driver's
thread thereby writes one byte to the pipe, which the loop watches. This needs neither the GIL nor compiled code, and
the main stream never waits for it. A callback into Python could deadlock, because it holds the driver's lock while it
waits for the GIL.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import DeviceLostError, EngineFailedError
from aengine.runtime.cuda.lost import PEER_TIMEOUT

FILES = 8  # more than the steps in flight; a FILE holds at most one byte
WATCHDOG_SECONDS = 1.0


class BytePipe:
    """Several FILEs that write to one pipe. Each FILE buffers at most one byte until it is flushed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.fdopen.restype = ctypes.c_void_p
        self._libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
        self._purge = self._libc["__fpurge"]  # an attribute of this name would be mangled
        for take_file in (self._libc.fflush, self._libc.fclose, self._purge):
            take_file.argtypes = [ctypes.c_void_p]
        self.flush = ctypes.cast(self._libc.fflush, ctypes.c_void_p)  # int (*)(FILE *)
        self.read_end, write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self._files = [self._libc.fdopen(os.dup(write_end), b"w") for _ in range(FILES)]
        os.close(write_end)
        self._next_file = itertools.cycle(self._files)

    def load(self) -> int:
        """Put a byte into the next FILE and return the FILE. Calling `flush` on it sends the byte."""
        file: int = next(self._next_file)
        self._libc.fwrite(b"x", 1, 1, file)
        return file

    def unload(self, file: int) -> None:
        """Drop the byte of a FILE that will not be flushed. Otherwise its next flush would send two."""
        self._purge(file)

    def close(self) -> None:
        """Close both ends."""
        for file in self._files:
            self._libc.fclose(file)
        os.close(self.read_end)


class DeviceClock:
    """Turns recorded events into futures, in order, for one loop. `close` it when no future is pending."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """streams: one for each rank, on which events are recorded."""
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._side = torch.cuda.Stream(streams[0].device)
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._cuda.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._pipe = BytePipe()
        self._pending: deque[tuple[Sequence[torch.cuda.Event], Tensor, asyncio.Future[None]]] = deque()
        self._watchdog: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._pipe.read_end, self._on_bytes)

    def watch(self, events: Sequence[torch.cuda.Event], failed: Tensor) -> asyncio.Future[None]:
        """Return a future that is done when all the recorded events are complete.

        failed: int32 [ranks] on the host, valid for a rank when its event is complete. If one is not 0, the future
            raises DeviceLostError at once, because the events of other ranks may never complete.

        Raises: EngineFailedError if the host function cannot be enqueued.
        """
        if len(self._pending) >= FILES:
            raise EngineFailedError(f"{len(self._pending)} device events are pending, at most {FILES} can be")
        future: asyncio.Future[None] = self._loop.create_future()
        for event in events:
            self._side.wait_event(event)
        file = self._pipe.load()
        if code := self._cuda.cuLaunchHostFunc(self._side.cuda_stream, self._pipe.flush, file):
            self._pipe.unload(file)
            raise EngineFailedError(f"cuLaunchHostFunc returned CUDA error {code}")
        self._pending.append((events, failed, future))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(WATCHDOG_SECONDS, self._check)
        return future

    def _on_bytes(self) -> None:
        for _ in os.read(self._pipe.read_end, 64):
            if self._pending:
                *_, future = self._pending.popleft()
                if not future.done():
                    future.set_result(None)

    def _check(self) -> None:
        """Fail the pending futures if a device is lost. CUDA then calls no more host functions."""
        self._watchdog = None
        try:
            for events, failed, _ in self._pending:
                complete = [event.query() for event in events]
                if any(itertools.compress(failed.tolist(), complete)):
                    raise DeviceLostError(PEER_TIMEOUT)
            for stream in self._streams:
                stream.query()
        except (RuntimeError, DeviceLostError) as error:
            while self._pending:
                *_, future = self._pending.popleft()
                if not future.done():
                    future.set_exception(error)
        if self._pending:
            self._watchdog = self._loop.call_later(WATCHDOG_SECONDS, self._check)

    def close(self) -> None:
        """Stop watching."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._loop.remove_reader(self._pipe.read_end)
        try:
            self._side.synchronize()
        finally:
            self._pipe.close()
