"""The events that end a stream whose replica is lost, as its path has them: the ingress says them in its place."""

from __future__ import annotations

import re

import msgspec
from starlette.types import Scope

from aengine.http.door.errors import ErrorBody, error_body_for, speaks_anthropic
from aengine.http.responses.events import failure_of
from aengine.http.streams import sse
from aengine.ray_serve.call import Head

_CREATED = re.compile(rb"event: response\.created\ndata: (?P<event>.*)\n")
_NUMBER = re.compile(rb'^data: \{"type":"[^"]*","sequence_number":(\d+)', re.MULTILINE)


class LastEvents:
    """Keeps of a stream what its last events build on: of a response its head, and the number of its newest event."""

    def __init__(self, head: Head) -> None:
        created = _CREATED.match(head.body)
        self._created = None if created is None else created["event"]
        self._newest = head.body

    def passed(self, piece: bytes) -> None:
        """Note a piece of the stream: some whole events."""
        if self._created is not None and _NUMBER.search(piece):  # pings have none
            self._newest = piece

    def of(self, error: Exception, scope: Scope) -> bytes:
        """The events that say that the stream failed. Those of a response repeat none of its items."""
        _, body = error_body_for(scope, error)
        if speaks_anthropic(scope):
            return b"event: error\n" + sse.event(body)
        if self._created is None or not isinstance(body, ErrorBody):
            return sse.event(body)
        told, ending = failure_of(body.error)
        response = msgspec.json.decode(self._created)["response"]
        failed = {**response, "status": ending.status, "error": ending.error}
        number = int(_NUMBER.findall(self._newest)[-1])
        return _numbered(number + 1, told) + _numbered(number + 2, {"type": "response.failed", "response": failed})


def _numbered(number: int, event: dict[str, object]) -> bytes:
    return sse.typed_event({"type": event["type"], "sequence_number": number, **event})
