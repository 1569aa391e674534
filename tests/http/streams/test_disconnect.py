"""If a client leaves, its request ends in the engine at once, in every way of leaving and every stage."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import anyio
import pytest

from aengine.text.answer.parser import ChatPrompt
from aengine.types import Fragment, Usage
from tests.http.fake_engine import FakeEngine, FakeStream
from tests.http.serving import raw_request, read_until, serving, streaming_command

pytestmark = pytest.mark.anyio

LAST = Fragment("!", (9,), None, "stop", Usage(1, 1, 0))


async def aborted_soon(stream: FakeStream) -> None:
    """Wait for the abort. It comes before the next heartbeat."""
    async with asyncio.timeout(60):
        await stream.aborted.wait()


def close(raw: socket.socket) -> None:
    raw.close()


def reset(raw: socket.socket) -> None:
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def half_close(raw: socket.socket) -> None:
    raw.shutdown(socket.SHUT_WR)


PATHS = [
    ("/generate", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    ("/v1/responses", {"input": "a", "stream": True}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": True}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
]


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("stream", [True, False])
async def test_while_waiting_for_the_next_token(leave: object, stream: bool) -> None:
    assert callable(leave)
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect("/generate", prompt="a", stream=stream)
        held = await server.engine.next_stream()
        held.put(Fragment("a", (1,)))
        if stream:
            await read_until(raw, b'"a"')
        leave(raw)
        await aborted_soon(held)
        raw.close()


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_at_every_endpoint(path: str, body: dict[str, object]) -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect(path, **body)
        held = await server.engine.next_stream()
        raw.close()
        await aborted_soon(held)


class Halt:
    """A point where a request waits until it is cancelled."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.left = asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.left.set()


class HaltingEngine(FakeEngine):
    """Waits for ever in one of its methods; in `submit` after the first prompt."""

    def __init__(self, where: str) -> None:
        super().__init__(held=True)
        self.where = where
        self.halt = Halt()
        if where == "encode":
            self.tokenizer.encode = self.wait  # type: ignore[method-assign]
        if where in ("embed", "score", "rerank"):
            setattr(self, where, self.wait)

    async def wait(self, *_: object, **__: object) -> Any:
        await self.halt.wait()

    async def submit(self, *prompt: Any, **options: Any) -> FakeStream:
        if self.where == "submit" and self.submitted:
            await self.wait()
        return await super().submit(*prompt, **options)

    async def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> ChatPrompt:
        if self.where == "encode_chat":
            await self.wait()
        return await super().encode_chat(messages, **options)


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize(
    ("where", "path", "body"),
    [
        ("submit", "/v1/completions", {"prompt": ["a", "b", "c"]}),
        ("encode", "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}),
        ("encode", "/tokenize", {"prompt": "a"}),
        ("encode_chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
        ("encode_chat", "/v1/responses", {"input": "a"}),
        ("encode_chat", "/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
        ("encode_chat", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("embed", "/v1/embeddings", {"input": ["a", "b"]}),
        ("score", "/score", {"text_1": "a", "text_2": ["b"]}),
        ("rerank", "/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_before_the_reply_begins(leave: object, where: str, path: str, body: dict[str, Any]) -> None:
    """While prompts are tokenized, rendered and submitted. Submitted prompts are aborted."""
    assert callable(leave)
    async with serving(HaltingEngine(where)) as server:
        assert isinstance(server.engine, HaltingEngine)
        raw = await server.connect(path, **body)
        async with asyncio.timeout(30):
            await server.engine.halt.reached.wait()
        leave(raw)
        async with asyncio.timeout(60):
            await server.engine.halt.left.wait()
        if where == "submit":
            await aborted_soon(await server.engine.next_stream())
        assert server.engine.failure is None
        raw.close()


async def test_a_killed_client() -> None:
    async with (
        serving(FakeEngine(held=True)) as server,
        await anyio.open_process(streaming_command(server.port, "/generate", {"prompt": "a"})) as process,
    ):
        held = await server.engine.next_stream()
        held.put(Fragment("hello", (1,)))
        assert process.stdout is not None
        heard = b""
        while b"hello" not in heard:
            heard += await process.stdout.receive()
        process.kill()
        await aborted_soon(held)


async def test_while_send_is_blocked_by_a_full_socket() -> None:
    """A stalled reader blocks only its own stream, and its disconnect is noticed as well."""
    big = "x" * 100_000
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect("/generate", receive_buffer=4096, prompt="a")
        held = await server.engine.next_stream()
        while held.backlog < 10:  # filled as fast as it is read, until the reader stalls
            held.put(Fragment(big, (1,)))
            for _ in range(10):
                await asyncio.sleep(0)
        other = await server.connect("/generate", prompt="b")
        second = await server.engine.next_stream()
        second.put(LAST)
        assert b"[DONE]" in await read_until(other, b"[DONE]\n\n")
        other.close()
        assert not held.aborted.is_set()
        raw.close()
        await aborted_soon(held)


async def test_a_stalled_reader_is_given_up_beyond_its_backlog() -> None:
    async with serving(FakeEngine(held=True), heartbeat=0.05, max_stream_backlog=50) as server:
        raw = await server.connect("/generate", receive_buffer=4096, prompt="a")
        held = await server.engine.next_stream()
        async with asyncio.timeout(30):
            while not held.aborted.is_set():
                held.put(Fragment("x" * 100_000, (1,)))
                await asyncio.sleep(0.001)
        assert held.backlog <= 50 + 1000
        raw.close()


async def test_a_client_that_pipelines_is_noticed_by_the_heartbeat() -> None:
    """Bytes after the request stop hypercorn from reading, so only a write shows that the client has left."""
    async with serving(FakeEngine(held=True), heartbeat=0.05) as server:
        raw = await server.connect("/generate", prompt="a")
        held = await server.engine.next_stream()
        await read_until(raw, b"\r\n\r\n")
        await asyncio.get_running_loop().sock_sendall(raw, raw_request("/generate", {"prompt": "b"}))
        await read_until(raw, b": ping")
        reset(raw)
        await aborted_soon(held)


async def test_a_finished_request_is_not_aborted_and_the_connection_lives_on() -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect("/generate", prompt="a")
        for _ in range(3):
            held = await server.engine.next_stream()
            held.put(LAST)
            assert (await read_until(raw, b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert not held.aborted.is_set()
            await asyncio.get_running_loop().sock_sendall(raw, raw_request("/generate", {"prompt": "a"}))
        raw.close()
        await aborted_soon(await server.engine.next_stream())


async def test_a_hundred_streams_at_once_half_of_which_leave() -> None:
    async with serving(FakeEngine(held=True)) as server:
        connections = [await server.connect("/generate", prompt=str(i)) for i in range(100)]
        streams = [await server.engine.next_stream() for _ in connections]
        by_prompt = dict(zip((request.prompt for request in server.engine.submitted), streams, strict=True))
        for raw in connections[::2]:
            raw.close()
        for position in range(0, 100, 2):
            await aborted_soon(by_prompt[str(position)])
        for position in range(1, 100, 2):
            by_prompt[str(position)].put(Fragment(f"only {position}", (1,)), LAST)
        for position in range(1, 100, 2):
            heard = await read_until(connections[position], b"[DONE]\n\n")
            events = [json.loads(line[6:]) for line in heard.split(b"\n") if line.startswith(b"data: {")]
            assert "".join(event["text"] for event in events) == f"only {position}!"
            connections[position].close()
