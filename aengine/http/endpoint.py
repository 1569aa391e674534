"""What endpoints have in common: a request is decoded, an answer bounded, a response made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.door.auth import CALLER
from aengine.http.door.body import FIELDS, LARGE, decode
from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.fields.prompts import CandidateBudget
from aengine.http.fields.unknown import RequestBody
from aengine.http.state import ServerState
from aengine.http.streams import sse
from aengine.http.streams.document import DocumentResponse
from aengine.http.streams.sse import EventEncoder, EventStreamResponse
from aengine.requests.sampling_params import SamplingParams
from aengine.types import Completion

_MOST_FIELDS = 1000  # of a body; no API has a tenth of them, and each is looked up

T = TypeVar("T", bound=RequestBody)


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
        fields = decode(body, FIELDS)
        if len(fields) > _MOST_FIELDS:
            raise InvalidRequestError(f"the body has {len(fields)} fields, and at most {_MOST_FIELDS} are looked at")
        if "structured_outputs" in fields or not fields.keys() <= set(read.__struct_fields__):
            self._state.unknown_fields.check(fields, type(read), request.scope["path"])
        return engine, read

    def _candidates(self, engine: EngineLike, params: SamplingParams, **counts: Any) -> CandidateBudget:
        return CandidateBudget(self._state.config.max_answer_candidates, engine, params, **counts)

    def _salt(self, request: Request, own: str | None) -> str | None:
        """The request's cache salt, `own` if it has one, apart from those of other API keys if the server's knob or
        several keys ask for that.
        """
        config, caller = self._state.config, request.scope.get(CALLER)
        apart = len(set(config.api_keys)) > 1 if config.salt_by_key is None else config.salt_by_key
        return f"{caller}/{own or ''}" if apart and caller is not None else own

    def _stream(self, stream: StreamLike, encoder: EventEncoder) -> Response:
        config = self._state.config
        return EventStreamResponse(stream, encoder, heartbeat=config.heartbeat, max_backlog=config.max_stream_backlog)

    def _whole(self, stream: StreamLike, body_of: Callable[[Completion], Awaitable[object]]) -> Response:
        return DocumentResponse(stream, body_of)


def json_response(payload: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response whose body is the payload, a struct or what JSON knows, encoded."""
    return Response(sse.encode(payload), status, headers, "application/json")
