"""`/v1/responses/{response_id}`: responses that are kept, to be read and forgotten."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.bodies.responses_api.answer import DeletedResponse, InputItemList
from aengine.http.bodies.responses_api.items import InputItem, InputPart
from aengine.http.door.auth import CALLER
from aengine.http.door.errors import HTTPError
from aengine.http.endpoints.base import json_response
from aengine.http.responses.kept import KeptResponse, input_of, items_of
from aengine.http.state import ServerState

_MOST_LISTED = 100
_LISTED = 20  # where nobody says how many
_YES = ("1", "true", "True")


class KeptResponseEndpoints:
    """Without the knob `kept_responses` they answer all that there is none, and why."""

    def __init__(self, state: ServerState) -> None:
        self._kept = state.kept_responses

    async def retrieve(self, request: Request) -> Response:
        kept = self._find(request)
        if request.query_params.get("stream") in _YES:
            raise InvalidRequestError("stream: a kept response is not streamed again", "stream")
        return Response(kept.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        kept = self._find(request)
        self._kept.forget(request.scope.get(CALLER), kept.id)
        return json_response(DeletedResponse(kept.id))

    async def input_items(self, request: Request) -> Response:
        """The items that the response answers, those of earlier turns included as far as they are kept."""
        kept = self._find(request)
        items = await self._earlier(request, kept) + await input_of(kept)
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be asc or desc", "order")
        if order == "desc":
            items.reverse()
        begin = 0
        if (after := query.get("after")) is not None:
            begin = next((index + 1 for index, item in enumerate(items) if item.id == after), -1)
            if begin < 0:
                raise InvalidRequestError("after: there is no item of this id", "after")
        end = begin + _limit(query.get("limit"))
        listed = [_listed(item) for item in items[begin:end]]
        first, last = (listed[0]["id"], listed[-1]["id"]) if listed else (None, None)
        return json_response(InputItemList(listed, first, last, has_more=end < len(items)))

    def _find(self, request: Request) -> KeptResponse:
        response_id = request.path_params["response_id"]
        if not self._kept.most:
            raise HTTPError(
                404, "not_found", "no responses are kept here; the server's knob kept_responses says how many are"
            )
        found = self._kept.find(request.scope.get(CALLER), response_id)
        if found is None:
            raise HTTPError(404, "not_found", f"there is no response {response_id[:100]!r} here (any more)")
        return found

    async def _earlier(self, request: Request, kept: KeptResponse) -> list[InputItem]:
        if kept.previous is None:
            return []
        try:
            return await items_of(self._kept.turns(request.scope.get(CALLER), kept.previous, "previous_response_id"))
        except InvalidRequestError:  # forgotten
            return []


def _limit(text: str | None) -> int:
    if text is None:
        return _LISTED
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _MOST_LISTED):
        raise InvalidRequestError(f"limit must be from 1 to {_MOST_LISTED}", "limit")
    return int(text)


def _listed(item: InputItem) -> dict[str, Any]:
    """An item as lists have it: with a type, a status, and a message's text as a part."""
    kind = item.type or "message"
    if kind == "message" and isinstance(item.content, str):
        part = InputPart(type="output_text" if item.role == "assistant" else "input_text", text=item.content)
        item.content = [part]
    listed: dict[str, Any] = msgspec.to_builtins(item) | {"type": kind, "status": "completed"}
    if kind == "message" and item.role == "assistant":
        listed["content"] = [{**part, "annotations": []} for part in listed["content"]]
    if kind == "reasoning":
        listed.setdefault("summary", [])
    return listed
