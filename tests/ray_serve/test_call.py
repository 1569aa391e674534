"""A call's answer is yielded in pieces, and its first token is reported."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from aengine.http.anthropic.events import MessageEventEncoder
from aengine.http.streams.sse import PING
from aengine.ray_serve.call import Call, FirstToken, Head
from aengine.ray_serve.keyed_engine import CallPrompt
from aengine.ray_serve.routing.prompt import Prompt

pytestmark = pytest.mark.anyio

ROLE = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
STREAM = Head(200, [(b"content-type", b"text/event-stream; charset=utf-8")], ROLE)
WHOLE = Head(200, [(b"content-type", b"application/json")], b"{}")


@pytest.mark.parametrize("ping", [PING, MessageEventEncoder.ping])
def test_the_first_token_of_a_stream_follows_its_head_and_pings(ping: bytes) -> None:
    token = FirstToken()
    assert [token.is_in(piece) for piece in (STREAM, ping, TOKEN, TOKEN)] == [False, False, True, False]


def test_a_whole_answer_comes_with_its_head() -> None:
    token = FirstToken()
    assert [token.is_in(piece) for piece in (WHOLE, b"more")] == [True, False]


async def test_a_chat_that_waits_has_a_head_and_has_not_begun() -> None:
    computed = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body: Message = {"type": "http.response.body", "more_body": True}
        await send({"type": "http.response.start", "status": 200, "headers": STREAM.headers})
        await send({**body, "body": ROLE})
        await computed.wait()
        await send({**body, "body": TOKEN})
        await send({"type": "http.response.body", "body": b""})

    began: list[None] = []
    call = Call(app, {"type": "http"}, b"{}", CallPrompt(Prompt()))
    pieces = call.pieces(lambda: began.append(None))
    assert await anext(pieces) == STREAM
    assert not began
    computed.set()
    assert [piece async for piece in pieces] == [TOKEN]
    assert len(began) == 1
