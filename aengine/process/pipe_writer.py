"""Writes to a pipe without waiting for its reader, which may have stopped reading."""

from __future__ import annotations

import os
import select
import threading

MAX_WAITING_BYTES = 2**20  # bytes that may wait for the reader
_PIECE = getattr(select, "PIPE_BUF", 512)  # bytes that a ready pipe accepts without blocking


class PipeWriter:
    """Writes at once while the pipe has room. Other data waits in memory, and a thread writes it.

    If more than `MAX_WAITING_BYTES` would wait, new data is dropped until the reader has read all waiting data. A line
    then says how many lines were dropped. The thread ends when no data waits. If the reader has left, all data is
    dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._dropped = 0  # lines
        self._dropping = False
        self._thread: threading.Thread | None = None  # None while no data waits

    def write(self, data: bytes) -> None:
        """Write data. Never blocks and never raises `OSError`."""
        with self._lock:
            if self._thread is None:
                data = self._write_now(data)
                if not data:
                    return
            self._dropping = self._dropping or len(self._waiting) + len(data) > MAX_WAITING_BYTES
            if self._dropping:
                self._dropped += data.count(b"\n")
            else:
                self._waiting += data
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_waiting, name="aengine-log", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait at most this long until the reader has read all data."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _write_now(self, data: bytes) -> bytes:
        """Write as much as the pipe has room for, and return the rest."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        try:
            while data and poll.poll(0):
                data = data[os.write(self._descriptor, data[:_PIECE]) :]
        except OSError:
            return b""
        return data

    def _write_waiting(self) -> None:
        while piece := self._next_piece():
            try:
                os.write(self._descriptor, piece)
            except OSError:
                with self._lock:
                    self._waiting.clear()
                    self._dropped = 0

    def _next_piece(self) -> bytes:
        with self._lock:
            if not self._waiting:
                if self._dropped:
                    self._waiting += b"aengine: %d lines were dropped here, because nobody read them\n" % self._dropped
                self._dropping, self._dropped = False, 0
            piece = bytes(self._waiting[:_PIECE])
            del self._waiting[:_PIECE]
            if not piece:
                self._thread = None
            return piece
