"""`GET /v1/models`: the model that is served here, and its adapters."""

from __future__ import annotations

from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response

from aengine.http.bodies.responses import ModelCard, ModelList
from aengine.http.endpoints.base import json_response
from aengine.http.engine_like import EngineLike
from aengine.http.state import ServerState
from aengine.types import AdapterInfo


class Models:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list(self, request: Request) -> Response:
        engine = self._state.require_engine()
        adapters = [self._adapter_card(engine, adapter) for adapter in engine.adapters]
        return json_response(ModelList([self._card(engine), *adapters]))

    async def retrieve(self, request: Request) -> Response:
        engine = self._state.require_engine()
        model = self._state.choose_model(request.path_params["model"])
        if model.adapter is None:
            return json_response(self._card(engine))
        card = next(adapter for adapter in engine.adapters if adapter.name == model.adapter)
        return json_response(self._adapter_card(engine, card))

    def _card(self, engine: EngineLike) -> ModelCard:
        return ModelCard(
            id=self._state.choose_model(None).name,
            created=engine.created,
            root=engine.model_name,
            max_model_len=engine.max_model_len,
        )

    def _adapter_card(self, engine: EngineLike, adapter: AdapterInfo) -> ModelCard:
        path = PurePath(adapter.path)
        return ModelCard(
            id=adapter.name,
            created=adapter.created,
            root=path.name if path.is_absolute() else adapter.path,  # where folders lie is nobody's business
            parent=self._state.choose_model(None).name,
            max_model_len=engine.max_model_len,
        )
