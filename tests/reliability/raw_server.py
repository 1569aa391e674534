"""A real `aengine serve` and what a client does to it byte by byte."""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from tests.cli.running import served

KEY = "the-key"
AUTHORIZED = f"Authorization: Bearer {KEY}\r\n".encode()
SECONDS = 20.0  # in which a test gives up; no figure of the server's


@dataclass(frozen=True, slots=True)
class RawServer:
    port: int
    pid: int
    client: httpx2.Client
    idle_files: int  # open while there is no connection

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(SECONDS)
        raw.connect(("127.0.0.1", self.port))
        return raw

    def ask(self, data: bytes) -> bytes:
        """Send this, and read until the server ends the connection. Raises `TimeoutError` if it does not."""
        with self.connect() as raw:
            return self.flood(raw, iter([data])).answer

    def flood(self, raw: socket.socket, pieces: Iterator[bytes], pause: float = 0.0) -> Flooded:
        """Send pieces, `pause` seconds apart, for as long as the server takes them, and read until it ends the
        connection. Raises `TimeoutError` if it does not."""
        heard, sent, first = b"", 0, None
        began, waiting, next_piece = time.monotonic(), memoryview(b""), 0.0
        raw.setblocking(False)
        more = True
        while True:
            now = time.monotonic()
            if now - began > SECONDS:
                raise TimeoutError(f"the connection is still open; so far it said {heard[:200]!r}")
            if more and not waiting and now >= next_piece:
                piece = next(pieces, None)
                more, next_piece = piece is not None, now + pause
                waiting = memoryview(piece or b"")
            readable, writable, _ = select.select([raw], [raw] if waiting else [], [], min(pause or 1.0, 1.0))
            try:
                if readable:
                    data = raw.recv(1 << 16)
                    if not data:
                        break
                    first = first or time.monotonic() - began
                    heard += data
                if writable:
                    count = raw.send(waiting[: 1 << 20])
                    sent, waiting = sent + count, waiting[count:]
            except ConnectionError:  # reset: also an end
                break
        return Flooded(heard, sent, first, time.monotonic() - began)

    def connections(self) -> int:
        return open_files(self.pid) - self.idle_files

    def memory(self) -> int:
        """Bytes in use right now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def figures(self) -> dict[str, float]:
        """All of the server's own that have no labels, as they are at the same moment."""
        text = self.client.get("/metrics").text
        return {name: float(value) for name, value in re.findall(r"^aengine_(\w+) (\S+)$", text, re.MULTILINE)}

    def figure(self, name: str) -> float:
        return self.figures()[name]

    def at_rest(self) -> bool:
        """Nothing runs, nothing waits, and no page is held by a request."""
        figures = self.figures()
        return not any(figures[name] for name in ("requests_running", "requests_waiting", "kv_pages_used"))


@dataclass(frozen=True, slots=True)
class Flooded:
    answer: bytes
    sent: int
    first: float | None  # seconds until the first byte of the answer
    seconds: float  # until the connection ended

    @property
    def status(self) -> int:
        return status(self.answer)


def status(answer: bytes) -> int:
    """Return the status, or 0 if there is no answer."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether it comes true in that time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def raw_server(*args: str) -> Iterator[RawServer]:
    """`aengine serve` with an API key and these flags."""
    headers = {"Authorization": f"Bearer {KEY}"}
    # A connection per request: the server ends idle ones after a time that tests choose, perhaps just as one is used.
    limits = httpx2.Limits(max_keepalive_connections=0)
    with (
        served("--api-keys", KEY, *args) as server,
        httpx2.Client(base_url=server.url, headers=headers, limits=limits, timeout=30, trust_env=False) as client,
    ):
        port = client.base_url.port
        assert port is not None
        pid = server.process.pid
        yield RawServer(port, pid, client, open_files(pid))
