"""Copies files to a device through a ring of buffers. Threads fill some buffers while the device copies from others.

A buffer for a GPU is pinned, so that copies are asynchronous and as fast as the bus. A thread fills it again only after
its copies are complete.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor

from aengine.errors import WeightsError
from aengine.model.checkpoint.pieces import Piece

BUFFER_BYTES = 32 * 2**20  # large, because each piece has to wait for the GIL
READERS = 14  # the most threads; a core copies a few GB/s out of the page cache, the bus transfers 50 GB/s
SENDING = 2  # buffers from which the device copies


class WeightsDigest:
    """A SHA-256 of all weights, independent of the order of reading. `add` may be called in any thread."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, str, int], bytes] = {}

    def add(self, piece: Piece, data: memoryview) -> None:
        """Add the contents of a piece. Hashing releases the GIL."""
        self._pieces[piece.path.name, piece.name, piece.start] = sha256(data).digest()

    def result(self) -> bytes:
        """Return the digest, once all pieces have been added."""
        return sha256(repr(sorted(self._pieces.items())).encode()).digest()


class Buffer(Protocol):
    """Host memory through which one piece goes from its file to a device."""

    def fill(self, piece: Piece) -> memoryview:
        """Read the piece from its file, in any thread, and return its bytes. Raises `WeightsError`."""
        ...

    def send(self, piece: Piece) -> None:
        """Enqueue the copies to the piece's memory, converted to its dtype, on the devices' current streams."""
        ...

    def wait(self) -> None:
        """Block until all enqueued copies have ended."""
        ...


class StagingBuffer:
    """Host memory, pinned if it feeds a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._memory = self._bytes.numpy().data
        self._sent: dict[torch.device, torch.cuda.Event] = {}  # of each GPU that it feeds

    def fill(self, piece: Piece) -> memoryview:
        missing = self._memory[: piece.nbytes]
        try:
            with piece.path.open("rb", buffering=0) as file:
                file.seek(piece.start)
                while missing:
                    count = file.readinto(missing)
                    if not count:
                        raise WeightsError(f"{piece.path}: ends within {piece.name}; it changed while it was read")
                    missing = missing[count:]
        except OSError as error:
            raise WeightsError(f"{piece.path}: {error}") from error
        return self._memory[: piece.nbytes]

    def send(self, piece: Piece) -> None:
        source = self._bytes[: piece.nbytes].view(piece.dtype)
        there: dict[torch.device, Tensor] = {}  # the whole piece, if only some columns are kept
        for destination in piece.destinations:
            device = destination.into.device
            # The device selects columns and converts. torch would do that on the host, in pageable memory.
            if destination.rows > 1:
                if device not in there:
                    there[device] = source.to(device, non_blocking=True)
                part = there[device].view(destination.rows, -1)[:, destination.start : destination.stop]
            else:
                part = source[destination.start : destination.stop].unsqueeze(0)
                if part.dtype != destination.into.dtype:
                    part = part.to(device, non_blocking=True)
            destination.into.copy_(part, non_blocking=True)
        for device in {destination.into.device for destination in piece.destinations}:
            if device.type == "cuda":
                if device not in self._sent:
                    self._sent[device] = torch.cuda.Event()
                self._sent[device].record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        for sent in self._sent.values():
            sent.synchronize()


def staging_ring(device: torch.device) -> list[StagingBuffer]:
    """Return the host memory for loading onto `device`: at most 512 MiB."""
    return [StagingBuffer(BUFFER_BYTES, device) for _ in range(min(READERS, os.cpu_count() or 1) + SENDING)]


def copy_pieces(
    pieces: Iterable[Piece],
    ring: Sequence[Buffer],
    done: Callable[[int], object],
    digest: WeightsDigest | None = None,
) -> None:
    """Read every piece and copy it to its memory, in order. Returns when all copies have ended.

    done: called with the bytes of each piece whose copy is enqueued.
    digest: every piece is added to it, in the thread that reads the piece.
    Raises `WeightsError` if reading fails.
    """
    reading: deque[tuple[Buffer, Piece, Future[None]]] = deque()

    def send_oldest() -> None:
        buffer, piece, read = reading.popleft()
        read.result()
        buffer.send(piece)
        done(piece.nbytes)

    def read_piece(buffer: Buffer, piece: Piece) -> None:
        data = buffer.fill(piece)
        if digest is not None:
            digest.add(piece, data)

    threads = max(1, len(ring) - SENDING)
    with ThreadPoolExecutor(threads, thread_name_prefix="aengine-weights") as readers:
        for piece, buffer in zip(pieces, itertools.cycle(ring)):
            if len(reading) == threads:
                send_oldest()
            buffer.wait()
            reading.append((buffer, piece, readers.submit(read_piece, buffer, piece)))
        while reading:
            send_oldest()
    for buffer in ring:
        buffer.wait()
