"""Which replica keeps which response: what refers to one has to go where it was made."""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec
from starlette.types import Scope

from aengine.ray_serve.call import Head

_MOST = 2**16  # responses that are known of
_PATH = re.compile(r"/*(?:v1/+){0,2}responses(?:/+(?P<id>[^/]+).*|/*)", re.DOTALL)
_MADE = re.compile(rb'"id":"(resp_\w+)"')
_WITHIN = 512  # bytes at the beginning of an answer in which its id stands


class _Body(msgspec.Struct):
    previous_response_id: str | None = None


_decoder = msgspec.json.Decoder(_Body)


class Keepers:
    """Notes the ids of responses as they pass, the newest of them."""

    def __init__(self) -> None:
        self._keepers: OrderedDict[str, str] = OrderedDict()  # response -> replica

    def of(self, scope: Scope, body: bytes) -> str | None:
        """The replica that keeps what a request refers to; None where it refers to nothing that is known of."""
        path = _PATH.fullmatch(scope["path"])
        if path is None:
            return None
        name = path["id"]
        if name is None and body:
            try:
                name = _decoder.decode(body).previous_response_id
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None  # the engine has the words for it
        return None if name is None else self._keepers.get(name)

    def answered(self, scope: Scope, head: Head, replica: str) -> None:
        """Note a new response."""
        if scope["method"] == "POST" and head.status == 200 and _PATH.fullmatch(scope["path"]) is not None:
            made = _MADE.search(head.body[:_WITHIN])
            if made is not None:
                self._keepers[made[1].decode()] = replica
                if len(self._keepers) > _MOST:
                    self._keepers.popitem(last=False)
