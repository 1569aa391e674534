"""Responses that are kept in memory, within bounds, and the endpoints that read and delete them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.endpoint import json_response
from aengine.http.entry.context import context_of
from aengine.http.entry.errors import HTTPError
from aengine.http.operation import NAME_ERRORS, Operation
from aengine.http.responses.answer import DeletedResponse, InputItemList, ResponseBody
from aengine.http.responses.bodies import InputItem, InputPart

MAX_TURNS = 256  # in a conversation; each request decodes all turns again
MAX_ITEMS = 2**16  # in a conversation's inputs
_SLICE = 1024  # items that are encoded or decoded in one iteration of the loop; 1 ms
_MOST_LISTED = 100
_LISTED = 20  # without a limit in the query
_YES = ("1", "true", "True")


class KeptResponse(msgspec.Struct, frozen=True):
    """A response and the input of its request, both as JSON."""

    id: str
    previous: str | None
    input: tuple[bytes, ...]  # consecutive lists of items, each with an id
    items: int  # in the input
    response: bytes

    @property
    def size(self) -> int:
        """The size in bytes."""
        return sum(map(len, self.input)) + len(self.response)


class _Answer(msgspec.Struct):
    output: list[InputItem]


_inputs = msgspec.json.Decoder(list[InputItem])
_answers = msgspec.json.Decoder(_Answer)


class _Share:
    """The responses of one caller, the least recently used one first."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, KeptResponse] = OrderedDict()
        self.bytes = 0

    def forget(self, response_id: str | None = None) -> bool:
        """Forget a response, by default the least recently used one. Returns whether it was kept."""
        if response_id is None:
            response_id = next(iter(self.responses))
        found = self.responses.pop(response_id, None)
        if found is not None:
            self.bytes -= found.size
        return found is not None


class KeptResponses:
    """The responses of all callers. No caller can read another caller's. With `most` 0 nothing is kept.

    `most` and `most_bytes` bound the responses of all callers together. Above a bound, the caller that uses most loses
    its least recently used response. So a caller that uses no more than an equal share loses none.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._shares: dict[str | None, _Share] = {}

    def keep(self, caller: str | None, response: KeptResponse) -> None:
        """Keep a response, unless it alone exceeds the bound."""
        if not self.most or response.size > self._most_bytes:
            return
        share = self._shares.setdefault(caller, _Share())
        share.responses[response.id] = response
        share.bytes += response.size
        shares = self._shares.values()
        while sum(len(one.responses) for one in shares) > self.most:
            max(shares, key=lambda one: len(one.responses)).forget()
        while sum(one.bytes for one in shares) > self._most_bytes:
            max(shares, key=lambda one: one.bytes).forget()

    def find(self, caller: str | None, response_id: str) -> KeptResponse | None:
        """Return the caller's response of this id, if it is kept."""
        share = self._shares.get(caller)
        if share is None or response_id not in share.responses:
            return None
        share.responses.move_to_end(response_id)
        return share.responses[response_id]

    def forget(self, caller: str | None, response_id: str) -> bool:
        """Forget a response. Returns whether it was kept."""
        share = self._shares.get(caller)
        return share is not None and share.forget(response_id)

    def turns(self, caller: str | None, response_id: str) -> list[KeptResponse]:
        """Return the response and all that it continues, the oldest first.

        Raises `InvalidRequestError` about `previous_response_id` if one is not kept or the conversation is too long.
        """
        field = "previous_response_id"
        if not self.most:
            raise InvalidRequestError(
                f"{field}: no responses are kept here, so none can be continued: send the whole conversation "
                "as input, or switch on the server's knob kept_responses",
                field,
            )
        turns: list[KeptResponse] = []
        items = 0
        wanted: str | None = response_id
        while wanted is not None:
            found = self.find(caller, wanted)
            if found is None:
                raise InvalidRequestError(
                    f"{field}: there is no response {wanted[:100]!r} here (any more); send the conversation as input",
                    field,
                )
            if len(turns) == MAX_TURNS:
                raise InvalidRequestError(
                    f"{field}: the conversation has more than {MAX_TURNS} turns; send the important items as input",
                    field,
                )
            turns.append(found)
            items += found.items
            if items > MAX_ITEMS:
                raise InvalidRequestError(
                    f"{field}: the conversation has more than {MAX_ITEMS} items; send the important items as input",
                    field,
                )
            wanted = found.previous
        turns.reverse()
        return turns


async def encoded_input(items: Sequence[InputItem]) -> tuple[bytes, ...]:
    """Encode a request's items for `KeptResponse.input`. Other tasks run between slices."""
    slices = []
    for start in range(0, len(items), _SLICE):
        slices.append(msgspec.json.encode(items[start : start + _SLICE]))
        await asyncio.sleep(0)
    return tuple(slices)


async def items_of(
    turns: Sequence[KeptResponse], *, last_answer: bool = True, newest_first: bool = False
) -> AsyncGenerator[InputItem, None]:
    """Yield the items of a conversation, inputs and answers. Other tasks run between slices.

    One slice is decoded at a time. With all items of many requests in memory, each garbage collection would hold the
    loop for long.

    last_answer: whether the items of the last turn's answer are included.
    """
    slices: list[tuple[bytes, bool]] = []  # with whether it is an answer
    for turn in turns:
        slices += [(encoded, False) for encoded in turn.input]
        slices.append((turn.response, True))
    if not last_answer:
        slices.pop()
    for encoded, is_answer in reversed(slices) if newest_first else slices:
        items = _answers.decode(encoded).output if is_answer else _inputs.decode(encoded)
        for item in reversed(items) if newest_first else items:
            yield item
        await asyncio.sleep(0)


class KeptResponseEndpoints:
    """Endpoints that read and delete kept responses. With the knob `kept_responses` at 0 they answer 404."""

    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept

    async def retrieve(self, request: Request) -> Response:
        kept = self._find(request)
        if request.query_params.get("stream") in _YES:
            raise InvalidRequestError("stream: a kept response is not streamed again", "stream")
        return Response(kept.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        kept = self._find(request)
        self._kept.forget(context_of(request.scope).caller, kept.id)
        return json_response(DeletedResponse(kept.id))

    async def input_items(self, request: Request) -> Response:
        """List the input items of a response, including the kept items of earlier turns."""
        kept = self._find(request)
        query = request.query_params
        order, after, limit = query.get("order", "desc"), query.get("after"), _limit(query.get("limit"))
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be asc or desc", "order")
        turns = [*self._earlier(request, kept), kept]
        page: list[InputItem] = []
        begun, has_more = after is None, False
        async with aclosing(items_of(turns, last_answer=False, newest_first=order == "desc")) as items:
            async for item in items:
                if not begun:
                    begun = item.id == after
                elif len(page) < limit:
                    page.append(item)
                else:
                    has_more = True
                    break
        if not begun:
            raise InvalidRequestError("after: there is no item of this id", "after")
        listed = [_listed(item) for item in page]
        first, last = (listed[0]["id"], listed[-1]["id"]) if listed else (None, None)
        return json_response(InputItemList(listed, first, last, has_more=has_more))

    def _find(self, request: Request) -> KeptResponse:
        response_id = request.path_params["response_id"]
        if not self._kept.most:
            raise HTTPError(
                404, "not_found", "no responses are kept here; the server's knob kept_responses says how many are"
            )
        found = self._kept.find(context_of(request.scope).caller, response_id)
        if found is None:
            raise HTTPError(404, "not_found", f"there is no response {response_id[:100]!r} here (any more)")
        return found

    def _earlier(self, request: Request, kept: KeptResponse) -> list[KeptResponse]:
        """Return the turns that the response continues; none if one of them is not kept any more."""
        if kept.previous is None:
            return []
        try:
            return self._kept.turns(context_of(request.scope).caller, kept.previous)
        except InvalidRequestError:
            return []


def _limit(text: str | None) -> int:
    if text is None:
        return _LISTED
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _MOST_LISTED):
        raise InvalidRequestError(f"limit must be from 1 to {_MOST_LISTED}", "limit")
    return int(text)


def _listed(item: InputItem) -> dict[str, Any]:
    """Return an item in the format of lists: with a type, a status, and a message's text as a part."""
    kind = item.type or "message"
    if kind == "message" and isinstance(item.content, str):
        part = InputPart(type="output_text" if item.role == "assistant" else "input_text", text=item.content)
        item.content = [part]
    for parts in (item.content, item.output):
        for one in parts if isinstance(parts, list) else ():
            one.image_url = None  # up to the size of a body
    listed: dict[str, Any] = msgspec.to_builtins(item) | {"type": kind, "status": "completed"}
    if kind == "message" and item.role == "assistant":
        listed["content"] = [{**part, "annotations": []} for part in listed["content"]]
    if kind == "reasoning":
        listed.setdefault("summary", [])
    return listed


def kept_operations(kept: KeptResponses) -> list[Operation]:
    """Return the operations on kept responses."""
    endpoints = KeptResponseEndpoints(kept)
    path = "/v1/responses/{response_id}"
    return [
        Operation(
            "GET",
            path,
            endpoints.retrieve,
            "A kept response.",
            answer=ResponseBody,
            refusals=(400, *NAME_ERRORS),
            query={"stream": "boolean"},
        ),
        Operation(
            "DELETE",
            path,
            endpoints.delete,
            "Delete a kept response.",
            answer=DeletedResponse,
            refusals=NAME_ERRORS,
        ),
        Operation(
            "GET",
            f"{path}/input_items",
            endpoints.input_items,
            "The input items of a kept response.",
            answer=InputItemList,
            refusals=(400, *NAME_ERRORS),
            query={"limit": "integer", "order": "string", "after": "string"},
        ),
    ]
