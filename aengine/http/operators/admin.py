"""`POST /abort` and `POST /flush_cache`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.endpoint import json_response
from aengine.http.entry.body import decode
from aengine.http.operation import BODY_ERRORS, ENGINE_ERRORS, Operation
from aengine.http.state import ServerState


class AbortRequest(msgspec.Struct, kw_only=True):
    """`POST /abort`."""

    request_id: Annotated[str, Meta(min_length=1)]


class Aborted(msgspec.Struct, frozen=True):
    """`POST /abort`."""

    aborted: int  # the number of requests


class Flushed(msgspec.Struct, frozen=True):
    """`POST /flush_cache`."""

    flushed: bool = True


_decoder = msgspec.json.Decoder(AbortRequest)


class Admin:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def abort(self, request: Request) -> Response:
        """End requests by their `X-Request-Id` or by the `id` in their answer. Ended requests do not count."""
        body = decode(await self._state.bodies.read(request), _decoder)
        in_flight = self._state.in_flight
        return json_response(Aborted(0 if in_flight is None else in_flight.abort(body.request_id)))

    async def flush_cache(self, request: Request) -> Response:
        """Forget the cached prefixes that no running request uses."""
        self._state.require_engine().flush_cache()
        return json_response(Flushed())


def operations(state: ServerState) -> list[Operation]:
    admin = Admin(state)
    return [
        Operation(
            "POST",
            "/abort",
            admin.abort,
            "End a request by its id.",
            body=AbortRequest,
            answer=Aborted,
            refusals=BODY_ERRORS,
        ),
        Operation(
            "POST", "/flush_cache", admin.flush_cache, "Forget cached prefixes.", answer=Flushed, refusals=ENGINE_ERRORS
        ),
        Operation(
            "POST",
            "/reset_prefix_cache",
            admin.flush_cache,
            "The same as /flush_cache, as in vLLM.",
            answer=Flushed,
            refusals=ENGINE_ERRORS,
        ),
    ]
