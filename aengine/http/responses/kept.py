"""Responses that are kept in memory, to be read again or continued: bounded, with a share for each caller."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from aengine.errors import InvalidRequestError
from aengine.http.bodies.responses_api.items import InputItem

MAX_TURNS = 256  # of a conversation: each is decoded again with every request that continues it
MAX_ITEMS = 2**16  # of a conversation's inputs; one body has fewer
_SLICE = 1024  # items that are encoded or decoded between two turns of the loop; 1 ms


class KeptResponse(msgspec.Struct, frozen=True):
    """A response and its request's own input, both as JSON."""

    id: str
    previous: str | None
    input: tuple[bytes, ...]  # lists of items, each with an id, one after the other
    items: int  # of the input
    response: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.input)) + len(self.response)


class _Answer(msgspec.Struct):
    output: list[InputItem]


_inputs = msgspec.json.Decoder(list[InputItem])
_answers = msgspec.json.Decoder(_Answer)


class _Share:
    """The responses of one caller, the one that was used last at the end."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, KeptResponse] = OrderedDict()
        self.bytes = 0

    def forget(self, response_id: str | None = None) -> bool:
        """Forget a response, or the one that was used longest ago; returns whether there was one."""
        if response_id is None:
            response_id = next(iter(self.responses))
        found = self.responses.pop(response_id, None)
        if found is not None:
            self.bytes -= found.size
        return found is not None


class KeptResponses:
    """The responses of all callers, by caller and id: no caller reads another's. With `most` 0 nothing is kept.

    `most` and `most_bytes` bound the responses of all callers together. When one of the bounds is passed, the caller
    that has most of it loses the response that it used longest ago. So a caller within an equal share loses none.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._shares: dict[str | None, _Share] = {}

    def keep(self, caller: str | None, response: KeptResponse) -> None:
        """Keep a response, unless it alone is beyond the bound."""
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
        """The caller's response of this id, if it is kept."""
        share = self._shares.get(caller)
        if share is None or response_id not in share.responses:
            return None
        share.responses.move_to_end(response_id)
        return share.responses[response_id]

    def forget(self, caller: str | None, response_id: str) -> bool:
        """Forget a response; returns whether there was one."""
        share = self._shares.get(caller)
        return share is not None and share.forget(response_id)

    def turns(self, caller: str | None, response_id: str, field: str) -> list[KeptResponse]:
        """The response and those that it goes on with, the oldest first.

        Raises `InvalidRequestError` about the request's `field` where one of them is not kept or it is too long.
        """
        if not self.most:
            raise InvalidRequestError(
                f"{field}: no responses are kept here, so that none can be gone on with: send the whole conversation "
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
                    f"{field}: the conversation has more than {MAX_TURNS} turns; send what matters of it as input",
                    field,
                )
            turns.append(found)
            items += found.items
            if items > MAX_ITEMS:
                raise InvalidRequestError(
                    f"{field}: the conversation has more than {MAX_ITEMS} items; send what matters of it as input",
                    field,
                )
            wanted = found.previous
        turns.reverse()
        return turns


async def encoded_input(items: Sequence[InputItem]) -> tuple[bytes, ...]:
    """Encode the items of a request as `KeptResponse.input`. Other tasks run between slices."""
    slices = []
    for start in range(0, len(items), _SLICE):
        slices.append(msgspec.json.encode(items[start : start + _SLICE]))
        await asyncio.sleep(0)
    return tuple(slices)


async def input_of(turn: KeptResponse) -> list[InputItem]:
    """Decode the items of a response's own input. Other tasks run between slices."""
    items: list[InputItem] = []
    for encoded in turn.input:
        items += _inputs.decode(encoded)
        await asyncio.sleep(0)
    return items


async def items_of(turns: list[KeptResponse]) -> list[InputItem]:
    """Decode the items of a conversation, as a request would send them. Other tasks run between slices."""
    items: list[InputItem] = []
    for turn in turns:
        items += await input_of(turn)
        items += _answers.decode(turn.response).output
    return items
