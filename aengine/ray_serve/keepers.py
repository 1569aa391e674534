"""Remembers which replica keeps which response. A request that refers to a response must go to its replica."""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec
from starlette.types import Scope

from aengine.ray_serve.call import Head

_MOST = 2**16  # responses that are remembered
_PATH = re.compile(r"/*(?:v1/+){0,2}responses(?:/+(?P<id>[^/]+).*|/*)", re.DOTALL)
_NEW_ID = re.compile(rb'"id":"(resp_\w+)"')
_HEAD_BYTES = 512  # the id is in these first bytes of an answer


class _Body(msgspec.Struct):
    previous_response_id: str | None = None


_decoder = msgspec.json.Decoder(_Body)


class Keepers:
    """Remembers the replicas of the newest responses."""

    def __init__(self) -> None:
        self._keepers: OrderedDict[str, str] = OrderedDict()  # response -> replica

    def find(self, scope: Scope, body: bytes) -> str | None:
        """Return the replica of the response that a request refers to; None if it refers to no known response."""
        path = _PATH.fullmatch(scope["path"])
        if path is None:
            return None
        name = path["id"]
        if name is None and body:
            try:
                name = _decoder.decode(body).previous_response_id
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None  # the engine will refuse it
        return None if name is None else self._keepers.get(name)

    def note(self, scope: Scope, head: Head, replica: str) -> None:
        """Remember the replica of a new response."""
        if scope["method"] == "POST" and head.status == 200 and _PATH.fullmatch(scope["path"]) is not None:
            made = _NEW_ID.search(head.body[:_HEAD_BYTES])
            if made is not None:
                self._keepers[made[1].decode()] = replica
                if len(self._keepers) > _MOST:
                    self._keepers.popitem(last=False)
