"""The operator's endpoints: `POST /abort` and `POST /flush_cache`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.bodies.requests import AbortRequest
from aengine.http.bodies.responses import Aborted, Flushed
from aengine.http.door.body import decode
from aengine.http.endpoints.base import json_response
from aengine.http.state import ServerState

_decoder = msgspec.json.Decoder(AbortRequest)


class Admin:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def abort(self, request: Request) -> Response:
        """End requests by their `X-Request-Id` or by the `id` in their answer; one that has ended does not count."""
        body = decode(await self._state.bodies.read(request), _decoder)
        in_flight = self._state.in_flight
        return json_response(Aborted(0 if in_flight is None else in_flight.abort(body.request_id)))

    async def flush_cache(self, request: Request) -> Response:
        """Forget the cached prefixes that no running request uses."""
        self._state.require_engine().flush_cache()
        return json_response(Flushed())
