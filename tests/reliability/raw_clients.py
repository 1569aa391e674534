"""Clients that cost little: one request on a raw connection of its own, and a server's plain numbers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, NamedTuple

from tests.cli.running import Served


class Answer(NamedTuple):
    status: int
    headers: str  # in lower case
    body: bytes  # with the framing of its chunks
    began: float  # time.monotonic() of its first byte
    ended: float


def request(path: str, **body: Any) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


async def ask(port: int, path: str, **body: Any) -> Answer:
    """The whole answer to one request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    try:
        writer.write(request(path, **body))
        headers = (await reader.readuntil(b"\r\n\r\n")).decode()
        began = time.monotonic()
        answer = await reader.read()
    finally:
        writer.close()
    return Answer(int(headers.split()[1]), headers.lower(), answer, began, time.monotonic())


def port_of(server: Served) -> int:
    return int(server.url.rpartition(":")[2])


def numbers(server: Served) -> dict[str, float]:
    """The metrics that have no label."""
    lines = server.client.get("/metrics").text.splitlines()
    pairs = [line.split() for line in lines if not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in pairs}


def resident(server: Served) -> int:
    """Bytes of memory that the server's process holds."""
    with open(f"/proc/{server.process.pid}/status") as status:
        kilobytes = next(line.split()[1] for line in status if line.startswith("VmRSS"))
    return int(kilobytes) * 1024
