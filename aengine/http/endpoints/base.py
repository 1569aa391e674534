"""What endpoints have in common: a request is decoded, an answer bounded, a response made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import ContextLengthError
from aengine.http.door.body import LARGE, decode
from aengine.http.endpoints.candidates import CandidateBudget
from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.state import ServerState
from aengine.http.streams import sse
from aengine.http.streams.responses import DocumentResponse, EventEncoder, EventStreamResponse
from aengine.sampling_params import SamplingParams
from aengine.types import Completion

T = TypeVar("T", bound=msgspec.Struct)


class Endpoint:
    """The base of an endpoint that generates."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def _accept(self, request: Request, decoder: msgspec.json.Decoder[T]) -> tuple[EngineLike, T]:
        """Decode the request: the engine and the body, refused in this order: unreadable, no engine, invalid."""
        body = await self._state.bodies.read(request)
        await self._state.turnstile.enter()
        engine, read = self._state.require_engine(), decode(body, decoder)
        if len(body) > LARGE:
            await asyncio.sleep(0)  # that took a while, and so will the rest
        self._state.unknown_fields.check(body, type(read), request.scope["path"])
        return engine, read

    def _candidates(self, engine: EngineLike, params: SamplingParams, **counts: Any) -> CandidateBudget:
        return CandidateBudget(self._state.config.max_answer_candidates, engine, params, **counts)

    def _stream(self, stream: StreamLike, encoder: EventEncoder) -> Response:
        config = self._state.config
        return EventStreamResponse(stream, encoder, heartbeat=config.heartbeat, max_backlog=config.max_stream_backlog)

    def _whole(self, stream: StreamLike, body_of: Callable[[Completion], Awaitable[object]]) -> Response:
        return DocumentResponse(stream, body_of)


def json_response(payload: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response whose body is the payload, a struct or what JSON knows, encoded."""
    return Response(sse.encode(payload), status, headers, "application/json")


async def submit_within_context(
    submit: Callable[[SamplingParams], Awaitable[StreamLike]], params: SamplingParams, requested_max_tokens: int | None
) -> StreamLike:
    """Submit; where only the endpoint's own default of max_tokens exceeds the context, submit again without it."""
    try:
        return await submit(params)
    except ContextLengthError as error:
        if requested_max_tokens is not None or params.max_tokens is None or error.param != "max_tokens":
            raise
        return await submit(msgspec.structs.replace(params, max_tokens=None))
