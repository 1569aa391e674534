"""Responses that are kept in memory, to be read again or gone on with: bounded, the one that was used longest ago is
forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from aengine.errors import InvalidRequestError
from aengine.http.bodies.responses_api.items import InputItem

MAX_TURNS = 256  # of a conversation: each is decoded again with every request that goes on with it


class KeptResponse(msgspec.Struct, frozen=True):
    """A response and its request's own input, both as JSON."""

    id: str
    previous: str | None
    input: bytes  # a list of items, each with an id
    response: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.input) + len(self.response)


class _Answer(msgspec.Struct):
    output: list[InputItem]


_inputs = msgspec.json.Decoder(list[InputItem])
_answers = msgspec.json.Decoder(_Answer)


class KeptResponses:
    """The responses of all callers, by caller and id: nobody reads another's. `most` and `most_bytes` bound them all;
    with `most` 0 nothing is kept.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str | None, str], KeptResponse] = OrderedDict()  # the latest used last
        self._bytes = 0

    def keep(self, caller: str | None, response: KeptResponse) -> None:
        """Keep a response, unless it alone is beyond the bound."""
        if not self.most or response.size > self._most_bytes:
            return
        self._kept[caller, response.id] = response
        self._bytes += response.size
        while len(self._kept) > self.most or self._bytes > self._most_bytes:
            _, forgotten = self._kept.popitem(last=False)
            self._bytes -= forgotten.size

    def find(self, caller: str | None, response_id: str) -> KeptResponse | None:
        """The caller's response of this id, if it is kept."""
        found = self._kept.get((caller, response_id))
        if found is not None:
            self._kept.move_to_end((caller, response_id))
        return found

    def forget(self, caller: str | None, response_id: str) -> bool:
        """Forget a response; returns whether there was one."""
        found = self._kept.pop((caller, response_id), None)
        if found is not None:
            self._bytes -= found.size
        return found is not None

    def turns(self, caller: str | None, response_id: str, field: str) -> list[KeptResponse]:
        """The response and those that it goes on with, the oldest first.

        Raises `InvalidRequestError` about the request's `field` where one of them is not kept or there are too many.
        """
        if not self.most:
            raise InvalidRequestError(
                f"{field}: no responses are kept here, so that none can be gone on with: send the whole conversation "
                "as input, or switch on the server's knob kept_responses",
                field,
            )
        turns: list[KeptResponse] = []
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
            wanted = found.previous
        turns.reverse()
        return turns


def items_of(turns: list[KeptResponse]) -> list[InputItem]:
    """The items of a conversation, as a request would send them."""
    items: list[InputItem] = []
    for turn in turns:
        items += _inputs.decode(turn.input)
        items += _answers.decode(turn.response).output
    return items
