"""A streaming request to an OpenAI-compatible server over a raw socket: what came when, and the usage at the end.

Each request opens a connection of its own. It costs the client a few microseconds per event, several times less than
the HTTP libraries, so that hundreds of streams can be measured from one process.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Reply:
    """One request as its client saw it; times in seconds of `perf_counter`."""

    began: float  # before the connection was opened
    times: list[float] = field(default_factory=list)  # of each event that carries text
    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ended: float = 0.0
    failed: str | None = None  # why it counts as failed

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.times[0] - self.began

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first. None if there is only one."""
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1) if self.completion_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that carry text."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def e2e(self) -> float:
        """Seconds until the stream was over."""
        return self.ended - self.began


@dataclass(frozen=True)
class Target:
    """A server, such as http://127.0.0.1:8000."""

    url: str
    api_key: str | None = None

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A request as it goes over the wire."""
        parts = urlsplit(self.url)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def connect(self, stream: EventStream) -> asyncio.BaseTransport:
        """Open a connection for one request."""
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: stream, parts.hostname or "127.0.0.1", port, ssl=secure)
        return transport


class EventStream(asyncio.Protocol):
    """Sends a request and reads its events into a `Reply`."""

    def __init__(self, request: bytes, reply: Reply, *, keep_text: bool) -> None:
        self._request = request
        self._reply = reply
        self._keep_text = keep_text
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._headers = True  # still in the headers
        self._chunked = False
        self._status = ""
        self._raw = b""  # received, not taken apart yet
        self._left = 0  # bytes of the chunk that are still to come, its line end included
        self._line = b""  # the beginning of a line
        self._over = False  # the last chunk was seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.done.done():
            return
        if self._headers:
            head, found, data = (self._raw + data).partition(b"\r\n\r\n")
            if not found:
                self._raw = head
                return
            self._headers, self._raw = False, b""
            self._status = head.split(b"\r\n", 1)[0].decode(errors="replace")
            self._chunked = b"transfer-encoding: chunked" in head.lower()
        if self._chunked:
            try:
                data = self._unchunked(data)
            except ValueError as error:
                self._reply.failed = f"the server breaks the chunked encoding: {error}"
                self._end(now)
                return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)
        if self._over:
            self.connection_lost(None)

    def _unchunked(self, data: bytes) -> bytes:
        """What the chunks carry."""
        if self._raw:
            data = self._raw + data
        at, end, pieces = 0, len(data), []
        while at < end:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                # `_left` counts the line end after a chunk, which is not text.
                pieces.append(piece[: len(piece) - max(0, 2 - self._left)])
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].split(b";")[0], 16)
            if size == 0:
                self._over = True
                break
            at = line_end + 2
            self._left = size + 2
        self._raw = data[at:]
        return b"".join(pieces)

    def _take(self, payload: bytes, now: float) -> None:
        reply = self._reply
        if payload == b"[DONE]":
            self._end(now)
            return
        try:
            event = _decode(payload)
        except msgspec.DecodeError as error:
            reply.failed = f"an event that is no JSON: {error}"
            return
        if event.error is not None:
            reply.failed = f"error event: {event.error}"[:200]
        if event.usage is not None:
            reply.prompt_tokens, reply.completion_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            reply.cached_tokens = details.cached_tokens or 0 if details is not None else 0
        for choice in event.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content
            if text:
                reply.times.append(now)
                if self._keep_text:
                    reply.text.append(text)

    def _end(self, now: float) -> None:
        if not self.done.done():
            self._reply.ended = now
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if " 200 " not in self._status:
            body = (self._line + self._raw).decode(errors="replace")
            self._reply.failed = f"{self._status or 'no answer'} {body}"[:200]
        elif self._reply.failed is None and not self._reply.completion_tokens:  # some servers say no [DONE]
            self._reply.failed = f"the connection was closed before the end: {error}"
        self._end(time.perf_counter())


async def ask(target: Target, request: bytes, *, patience: float, keep_text: bool = False) -> Reply:
    """Send a streaming request and read it to its end, for at most `patience` seconds.

    Never raises for a failed request: `failed` holds the reason.
    """
    reply = Reply(began=time.perf_counter())
    stream = EventStream(request, reply, keep_text=keep_text)
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(patience):
            transport = await target.connect(stream)
            await stream.done
    except (OSError, TimeoutError) as error:
        reply.failed = f"{type(error).__name__}: {error}"
        reply.ended = time.perf_counter()
    finally:
        if transport is not None:
            transport.close()
    if reply.failed is None and not reply.completion_tokens:
        reply.failed = "no usage in the stream: tokens cannot be counted"
    elif reply.failed is None and not reply.times:
        reply.failed = "a stream without any text"
    return reply


async def first_model(target: Target) -> str:
    """The id of the first model that the server lists. Raises `OSError` or `ValueError` when there is none."""
    parts = urlsplit(target.url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        parts.hostname or "127.0.0.1", parts.port or (443 if secure else 80), ssl=secure
    )
    writer.write(target.request("GET", "/v1/models"))
    answer = await reader.read()
    writer.close()
    start, end = answer.find(b"{"), answer.rfind(b"}")
    if b" 200 " not in answer.split(b"\r\n", 1)[0] or start < 0:
        raise ValueError(f"{target.url}/v1/models answers {answer[:100]!r}: give --model")
    listed = msgspec.json.decode(answer[start : end + 1])
    return str(listed["data"][0]["id"])
