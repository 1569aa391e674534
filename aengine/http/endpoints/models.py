"""`GET /v1/models`: the one model that is served here."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from aengine.http.bodies.responses import ModelCard, ModelList
from aengine.http.endpoints.base import json_response
from aengine.http.state import ServerState


class Models:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list(self, request: Request) -> Response:
        return json_response(ModelList([self._card(None)]))

    async def retrieve(self, request: Request) -> Response:
        return json_response(self._card(request.path_params["model"]))

    def _card(self, name: str | None) -> ModelCard:
        engine = self._state.require_engine()
        name = self._state.check_model(name)
        return ModelCard(id=name, created=engine.created, max_model_len=engine.max_model_len)
