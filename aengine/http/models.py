"""`GET /v1/models`: the one model that is served here."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aengine.http import sse
from aengine.http.state import ServerState


class Models:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card(None)]})

    async def retrieve(self, request: Request) -> Response:
        return _json(self._card(request.path_params["model"]))

    def _card(self, asked_for: str | None) -> dict[str, Any]:
        engine = self._state.require_engine()
        return {
            "id": self._state.check_model(asked_for),
            "object": "model",
            "created": engine.created,
            "owned_by": "aengine",
            "max_model_len": engine.max_model_len,
        }


def _json(payload: object) -> Response:
    return Response(sse.encode(payload), media_type="application/json")
