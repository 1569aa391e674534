"""An OpenAI-compatible server without a model: canned events at a known rate, to weigh a load generator against.

    python bench/null_server.py --port 8100 --first-ms 20 --gap-ms 10

Each stream gets its first token `--first-ms` after its request and one more every `--gap-ms`, on an absolute schedule
of its own, so that a late event is not handed on to the next; then usage and `[DONE]`. `--gap-ms 0` writes as fast as
the reader reads. Whatever a client measures beyond these numbers is the client's (or the machine's).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import Any

import msgspec

SLICE = 64  # events in one write if there is no gap between them


class _Body(msgspec.Struct):
    """What matters of a request; everything else is ignored."""

    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.encode


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _event(**fields: Any) -> bytes:
    return _chunk(b"data: %b\n\n" % _encode({"id": "null-0", "created": 0, "model": "null", **fields}))


_COMPLETION = _event(object="text_completion", choices=[{"index": 0, "text": " word", "finish_reason": None}])
_CHAT = _event(object="chat.completion.chunk", choices=[{"index": 0, "delta": {"content": " word"}}])
_MODELS = _encode({"object": "list", "data": [{"id": "null", "object": "model"}]})
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


class NullStream(asyncio.Protocol):
    """One connection, one request."""

    def __init__(self, first: float, gap: float) -> None:
        self._first = first  # seconds
        self._gap = gap
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._left = -1  # events; below 0: the request is not there yet
        self._event = b""
        self._usage = b""
        self._next = 0.0  # when the next event is due, in the loop's time
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or self._left >= 0 or self._transport is None:
            return
        fields = dict(line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:])
        if len(body) < int(fields.get(b"content-length", b"0")):
            return
        if head.startswith(b"GET"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(_MODELS), _MODELS)
            )
            self._transport.close()
            return
        self._begin(_decode(body))

    def _begin(self, body: _Body) -> None:
        self._next = self._loop.time() + self._first
        self._left = tokens = body.max_completion_tokens or body.max_tokens or 16
        if body.messages is None:
            asked = len(body.prompt.split() if isinstance(body.prompt, str) else body.prompt)
            self._event = _COMPLETION
        else:
            asked = sum(len(str(message.get("content")).split()) for message in body.messages)
            self._event = _CHAT
        usage = {"prompt_tokens": asked, "completion_tokens": tokens, "total_tokens": asked + tokens}
        self._usage = _event(choices=[], usage=usage)
        if self._transport is not None:
            self._transport.write(_HEAD)
        self._timer = self._loop.call_at(self._next, self._send)

    def _send(self) -> None:
        if self._transport is None:
            return
        if self._paused:  # by a slow reader; `resume_writing` continues
            self._timer = None
            return
        count = 1 if self._gap else min(SLICE, self._left)
        self._transport.write(self._event * count)
        self._left -= count
        if self._left <= 0:
            self._transport.write(self._usage + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            self._transport.close()
            return
        self._next += self._gap
        self._timer = self._loop.call_at(self._next, self._send)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._timer is None and self._left > 0:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()


async def null_server(port: int, first_ms: float, gap_ms: float) -> asyncio.Server:
    """Listen on loopback (port 0: any)."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(
        lambda: NullStream(first_ms / 1e3, gap_ms / 1e3), "127.0.0.1", port, backlog=4096, reuse_address=True
    )


async def serve(options: argparse.Namespace) -> None:
    """Until SIGINT or SIGTERM."""
    server = await null_server(options.port, options.first_ms, options.gap_ms)
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
