"""If a client leaves, its handler is cancelled, unless the last message is being sent."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.http.entry.context import context_of
from aengine.http.hypercorn.receiving import Receiving

pytestmark = pytest.mark.anyio

SCOPE: Scope = {"type": "http", "http_version": "1.1", "headers": []}
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
LAST: Message = {"type": "http.response.body", "body": b""}


class Client:
    """Sends a body in two messages, and disconnects on request."""

    def __init__(self) -> None:
        self.messages: list[Message] = [
            {"type": "http.request", "body": b"a", "more_body": True},
            {"type": "http.request", "body": b"b"},
        ]
        self.leaves = asyncio.Event()
        self.heard: list[Message] = []

    async def receive(self) -> Message:
        if self.messages:
            return self.messages.pop(0)
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.heard.append(message)

    async def ask(self, app: ASGIApp) -> None:
        async with asyncio.timeout(60):
            await Receiving(app)(dict(SCOPE), self.receive, self.send)


async def read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    return body


async def test_work_is_cancelled_when_its_client_leaves() -> None:
    client, why = Client(), list[bool]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await read(receive) == b"ab"
        client.leaves.set()
        try:
            await anyio.sleep_forever()
        finally:
            why.append(context_of(scope).client_left)

    await client.ask(app)
    assert why == [True]
    assert client.heard == []


async def test_a_handler_that_waits_for_the_disconnect_is_cancelled() -> None:
    client = Client()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)
        client.leaves.set()
        await receive()
        raise AssertionError("not reached")

    await client.ask(app)


async def test_sending_the_last_message_is_not_cancelled() -> None:
    """The server reports a disconnect after a complete answer, while the last message is being sent."""
    client = Client()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)
        await send(START)
        await send(LAST)

    async def send(message: Message) -> None:
        if message is LAST:
            client.leaves.set()
            await asyncio.sleep(0.01)
        client.heard.append(message)

    await Receiving(app)(dict(SCOPE), client.receive, send)
    assert client.heard == [START, LAST]


async def test_nothing_is_watched_before_the_body_has_been_read() -> None:
    client = Client()
    client.leaves.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.01)
        assert await receive() == {"type": "http.request", "body": b"a", "more_body": True}
        await send(dict(START))
        await send(LAST)

    await client.ask(app)
    assert client.heard == [START, LAST]


async def test_a_disconnect_during_the_body_reaches_the_handler() -> None:
    client = Client()
    client.messages.pop()
    client.leaves.set()
    types = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        types.extend([(await receive())["type"], (await receive())["type"]])

    await client.ask(app)
    assert types == ["http.request", "http.disconnect"]


async def test_an_error_comes_out_as_it_is() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await Client().ask(app)


async def test_a_cancellation_from_outside_is_not_a_departure() -> None:
    client, why = Client(), list[bool]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)
        try:
            await anyio.sleep_forever()
        finally:
            why.append(context_of(scope).client_left)

    with anyio.move_on_after(0.01) as scope:
        await client.ask(app)
    assert scope.cancelled_caught
    assert why == [False]
