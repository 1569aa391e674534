"""`GET /v1/models`: the served model and its adapters."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.endpoint import json_response
from aengine.http.engine_like import EngineLike
from aengine.http.operation import ENGINE_ERRORS, NAME_ERRORS, Operation
from aengine.http.state import ServerState
from aengine.types import AdapterInfo


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models/{model}`: fields of OpenAI and vLLM, then those of Anthropic, then ours."""

    id: str
    object: Literal["model"] = "model"
    created: int  # unix seconds
    owned_by: str = "aengine"
    root: str  # the Hugging Face id, or the folder's name
    parent: str | None = None  # the model, if this is an adapter
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    takes_images: bool  # in messages of the user


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`: all models on one page."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class Models:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list(self, request: Request) -> Response:
        engine = self._state.require_engine()
        cards = [*self._cards(engine), *(self._adapter_card(engine, adapter) for adapter in engine.adapters)]
        return json_response(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))

    async def retrieve(self, request: Request) -> Response:
        engine = self._state.require_engine()
        model = self._state.choose_model(request.path_params["model"])
        if model.adapter is None:
            cards = {card.id: card for card in self._cards(engine)}
            return json_response(cards.get(request.path_params["model"], cards[model.name]))
        card = next(adapter for adapter in engine.adapters if adapter.name == model.adapter)
        return json_response(self._adapter_card(engine, card))

    def _cards(self, engine: EngineLike) -> Iterator[ModelCard]:
        """Yield a card for each of the model's names."""
        for name in self._state.model_names:
            yield _card(engine, name, engine.created, engine.model_name)

    def _adapter_card(self, engine: EngineLike, adapter: AdapterInfo) -> ModelCard:
        path = PurePath(adapter.path)
        root = path.name if path.is_absolute() else adapter.path  # clients do not see the folder's path
        return _card(engine, adapter.name, adapter.created, root, parent=self._state.choose_model(None).name)


def _card(engine: EngineLike, name: str, created: int, root: str, parent: str | None = None) -> ModelCard:
    context = engine.max_model_len
    return ModelCard(
        id=name,
        created=created,
        root=root,
        parent=parent,
        max_model_len=context,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC),
        max_input_tokens=context,
        max_tokens=context,
        takes_images=not engine.no_images,
    )


def operations(state: ServerState) -> list[Operation]:
    models = Models(state)
    return [
        Operation("GET", "/v1/models", models.list, "The served models.", answer=ModelList, refusals=ENGINE_ERRORS),
        Operation(
            "GET",
            "/v1/models/{model:path}",
            models.retrieve,
            "One model.",
            answer=ModelCard,
            refusals=(*NAME_ERRORS, *ENGINE_ERRORS),
        ),
    ]
