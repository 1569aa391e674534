"""What the generating endpoints share: from a request to a stream, and from a stream to a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import ContextLengthError
from aengine.http.door.body import LARGE, decode, read_body
from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.state import ServerState
from aengine.http.streams.replies import Dialect, StreamingReply, WholeReply
from aengine.http.streams.running import ListedReply
from aengine.types import Completion, SamplingParams

T = TypeVar("T", bound=msgspec.Struct)


class Endpoint:
    """The base of an endpoint that generates."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def _accept(self, request: Request, decoder: msgspec.json.Decoder[T]) -> tuple[EngineLike, T]:
        """The engine and the body, refused in this order: unreadable, no engine, invalid."""
        body = await read_body(request, self._state.config)
        await self._state.turnstile.enter()
        engine, read = self._state.require_engine(), decode(body, decoder)
        if len(body) > LARGE:
            await asyncio.sleep(0)  # that took a while, and so will the rest
        self._state.unknown_fields.check(body, type(read), request.scope["path"])
        return engine, read

    def _stream(self, stream: StreamLike, dialect: Dialect) -> Response:
        config = self._state.config
        reply = StreamingReply(stream, dialect, heartbeat=config.heartbeat, max_backlog=config.max_stream_backlog)
        return ListedReply(reply, stream, self._state.replies)

    def _whole(self, stream: StreamLike, word: Callable[[Completion], Awaitable[bytes]]) -> Response:
        return ListedReply(WholeReply(stream, word), stream, self._state.replies)


async def submit_within_context(
    submit: Callable[[SamplingParams], Awaitable[StreamLike]], params: SamplingParams, asked_for: int | None
) -> StreamLike:
    """Submit; where only the endpoint's own default of max_tokens is too long, until the context is full."""
    try:
        return await submit(params)
    except ContextLengthError:
        if asked_for is not None or params.max_tokens is None:
            raise
        return await submit(msgspec.structs.replace(params, max_tokens=None))
