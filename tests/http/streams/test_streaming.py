"""The pace of a stream: waiting fragments are sent together, silence has comments, a shutdown has an event."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from aengine.config import ServerConfig
from aengine.errors import EngineFailedError
from aengine.http.hypercorn.receiving import Receiving
from aengine.http.native.generate import GenerateEventEncoder
from aengine.http.streams.document import DocumentResponse
from aengine.http.streams.fragments import SLICE
from aengine.http.streams.sse import EventStreamResponse
from aengine.types import Completion, Fragment, Usage
from tests.http.fake_engine import FakeEngine, FakeStream
from tests.http.serving import parse_events, read_until, serving

pytestmark = pytest.mark.anyio

LAST = Fragment("!", (9,), None, "stop", Usage(1, 3, 0))


class Wire:
    """The two ends of an ASGI connection. `gate` blocks `send`, as a full socket does."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.blocked = asyncio.Event()  # a send waits at the gate
        self.spoken = asyncio.Event()  # a part of the body was sent
        self.left = asyncio.Event()
        self._body_read = False

    async def receive(self) -> Message:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request"}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.spoken.set()
        if not self.gate.is_set():
            self.blocked.set()
            await self.gate.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


def answer(reply: Response, wire: Wire) -> asyncio.Task[None]:
    """Run the response as a server does after it has read the body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await reply(scope, receive, send)

    watched = Receiving(app)
    return asyncio.ensure_future(
        watched({"type": "http", "http_version": "1.1", "headers": []}, wire.receive, wire.send)
    )


def start(
    stream: FakeStream, wire: Wire, *, n: int = 1, heartbeat: float = 10, max_backlog: int = 100
) -> asyncio.Task[None]:
    encoder = GenerateEventEncoder(n)
    reply = EventStreamResponse(stream, encoder, ServerConfig(heartbeat=heartbeat, max_stream_backlog=max_backlog))
    return answer(reply, wire)


def start_whole(stream: FakeStream, wire: Wire) -> asyncio.Task[None]:
    async def word(completion: Completion) -> bytes:
        return b"{}"

    return answer(DocumentResponse(stream, word), wire)


def words(*texts: str, index: int = 0) -> list[Fragment]:
    return [Fragment(text, (position,), index=index) for position, text in enumerate(texts)]


async def test_a_stream_on_time_sends_each_fragment_at_once() -> None:
    stream, wire = FakeStream("id", 1, one_by_one=True), Wire()
    stream.put(*words("a", "b"), LAST)
    await start(stream, wire)
    assert len(wire.bodies) == 3
    assert wire.sent[-1]["more_body"] is False


async def test_waiting_fragments_are_one_event() -> None:
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    wire.gate.clear()
    task = start(stream, wire)
    await wire.blocked.wait()  # in the response's start
    stream.put(*words("a", "b", "c"))
    wire.gate.set()
    await wire.spoken.wait()
    stream.put(LAST)
    await task
    assert wire.bodies[0] == b'data: {"text":"abc","token_ids":[0,1,2],"finish_reason":null}\n\n'
    assert len(wire.bodies) == 2


async def test_several_choices_behind_are_one_event_each_and_one_send() -> None:
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    stream.put(*words("a", "b", index=1), *words("c", "d", index=0), LAST)
    await start(stream, wire, n=2)
    assert len(wire.bodies) == 1
    first, second, done = parse_events(wire.bodies[0].decode())
    assert (first["index"], first["text"]) == (1, "ab")
    assert (second["index"], second["text"], second["finish_reason"]) == (0, "cd!", "stop")
    assert done == "[DONE]"


async def test_a_stream_far_behind_is_sent_in_several_messages() -> None:
    """The server never keeps much more than 64 KiB of encoded text."""
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    stream.put(*words(*["x" * 1000] * 256), LAST)
    await start(stream, wire)
    assert max(map(len, wire.bodies)) < 3 * 2**16
    events = [event for body in wire.bodies for event in parse_events(body.decode())]
    assert "".join(event["text"] for event in events[:-1]) == "x" * 256_000 + "!"


async def test_other_tasks_run_while_a_stream_far_behind_is_encoded() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    stream.put(*words(*"x" * 100 * SLICE), LAST)
    beside = asyncio.create_task(other())
    await start(stream, wire)
    beside.cancel()
    assert len(wire.bodies) == 1
    assert turns >= 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_continuous_usage_counts_tokens_and_not_fragments(path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(FakeEngine(held=True)) as server:
        requested = asyncio.create_task(server.events(path, **body, stream=True, stream_options=options))
        stream = await server.engine.next_stream()
        stream.put(Fragment("ab", (1, 2)), Fragment("cd", (3, 4)), Fragment("!", (5, 6), None, "stop", Usage(1, 6, 0)))
        *chunks, _, _ = await requested  # then the usage, and [DONE]
    assert chunks[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}


async def test_silence_is_filled_with_comments() -> None:
    async with serving(FakeEngine(held=True), heartbeat=0.05) as server:
        raw = await server.connect("/generate", prompt="a")
        stream = await server.engine.next_stream()
        async with asyncio.timeout(20):  # half a second on an idle machine
            for _ in range(10):
                await read_until(raw, b": ping\n\n")
        stream.put(LAST)
        assert b"[DONE]" in await read_until(raw, b"[DONE]\n\n")
        raw.close()


async def test_a_stream_that_speaks_gets_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat passes again and again, each time after a token; at last, after a silence."""
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    passed: asyncio.Queue[None] = asyncio.Queue()  # heartbeats
    watching: asyncio.Queue[None] = asyncio.Queue()  # waits for the next heartbeat

    real, here = anyio.sleep, asyncio.get_running_loop()

    async def sleep(seconds: float) -> None:
        if asyncio.get_running_loop() is not here:  # of a server in another thread of this process
            await real(seconds)
            return
        watching.put_nowait(None)
        await passed.get()

    monkeypatch.setattr(anyio, "sleep", sleep)
    task = start(stream, wire, heartbeat=0.5)
    await watching.get()
    for number in range(5):
        wire.spoken.clear()
        stream.put(*words("a"))
        await wire.spoken.wait()
        passed.put_nowait(None)
        await watching.get()
        assert len(wire.bodies) == number + 1
    wire.spoken.clear()
    passed.put_nowait(None)
    await wire.spoken.wait()
    assert wire.bodies[-1] == b": ping\n\n"
    stream.put(LAST)
    await task


async def test_a_stalled_reader_gets_no_comments() -> None:
    """A message that waits for its reader does not count as silence."""
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    wire.gate.clear()
    task = start(stream, wire, heartbeat=0.02)
    await wire.blocked.wait()
    await asyncio.sleep(0.2)
    assert wire.bodies == []
    wire.gate.set()
    stream.put(LAST)
    await task


async def test_a_reader_too_far_behind_is_aborted() -> None:
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    wire.gate.clear()
    task = start(stream, wire, heartbeat=0.05, max_backlog=10)
    await wire.blocked.wait()
    stream.put(*words(*"abcdefghij"))
    with pytest.raises(TimeoutError):  # ten behind is allowed
        await asyncio.wait_for(stream.aborted.wait(), 0.2)
    stream.put(*words("k"))
    await asyncio.wait_for(stream.aborted.wait(), 60)
    await task
    assert not any(message.get("more_body") is False for message in wire.sent)  # the response ends unfinished


async def test_a_comment_that_cannot_be_sent_does_not_stop_the_watch() -> None:
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    task = start(stream, wire, heartbeat=0.05, max_backlog=10)
    stream.put(*words("a"))
    await wire.spoken.wait()
    wire.gate.clear()
    await wire.blocked.wait()
    assert wire.bodies[-1] == b": ping\n\n"
    await asyncio.sleep(0.2)
    assert wire.bodies.count(b": ping\n\n") == 1  # no second one
    wire.blocked.clear()
    stream.put(*words("b"))
    await wire.blocked.wait()  # taken, and blocked by the comment
    stream.put(*words(*"abcdefghijk"))
    await asyncio.wait_for(stream.aborted.wait(), 60)
    await task


async def test_nothing_is_sent_to_a_client_that_left() -> None:
    for reply_in in (start, start_whole):
        stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
        task = reply_in(stream, wire)
        await asyncio.sleep(0.01)
        said = len(wire.sent)
        wire.left.set()
        await task
        assert stream.aborted.is_set()
        assert len(wire.sent) == said


async def test_a_cancelled_reply_aborts_its_request() -> None:
    """The server cancels the task although the client is connected."""
    for reply_in in (start, start_whole):
        stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
        task = reply_in(stream, wire)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.aborted.is_set()


async def test_a_cancelled_reply_does_not_wait_for_a_reader_to_hear_of_it() -> None:
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    wire.gate.clear()
    task = start(stream, wire)
    await wire.blocked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert stream.aborted.is_set()


async def test_a_reported_failure_is_not_raised() -> None:
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    stream.fail(EngineFailedError("lost"))
    await start(stream, wire)
    assert b"lost" in wire.bodies[-1]


async def test_a_bug_is_reported_by_its_type_and_raised() -> None:
    stream, wire = FakeStream("id", 1, one_by_one=False), Wire()
    stream.fail(KeyError("secret"))
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await start(stream, wire)
    assert b"KeyError" in wire.bodies[-1]
    assert b"secret" not in wire.bodies[-1]


async def test_a_stream_cancelled_by_the_shutdown_ends_with_an_error_event() -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect("/generate", prompt="a")
        stream = await server.engine.next_stream()
        stream.put(*words("a"))
        await read_until(raw, b'"text":"a"')
        server.stop.set()
        rest = await read_until(raw, b"never")
        raw.close()
        await asyncio.wait_for(stream.aborted.wait(), 60)
    assert b'data: {"error":{"message":"the server is shutting down"' in rest
    assert rest.endswith(b"0\r\n\r\n")


async def test_a_request_cancelled_by_the_shutdown_is_answered() -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect("/generate", prompt="a", stream=False)
        stream = await server.engine.next_stream()
        server.stop.set()
        answer = await read_until(raw, b"never")
        raw.close()
        await asyncio.wait_for(stream.aborted.wait(), 60)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"shutting_down"' in answer


async def test_a_shutdown_waits_for_streams_that_end_in_time() -> None:
    async with serving(FakeEngine(held=True), graceful_timeout=5) as server:
        raw = await server.connect("/generate", prompt="a")
        stream = await server.engine.next_stream()
        server.stop.set()
        stream.put(LAST)
        assert b"[DONE]" in await read_until(raw, b"never")
        raw.close()
