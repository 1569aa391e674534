"""The declaration of an endpoint, from which its route and its entry in the OpenAPI document come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.door.errors import ErrorBody

Handler = Callable[[Request], Awaitable[Response]]


READS = (400, 408, 413, 415)  # refusals of what reads a body,
SERVES = (503,)  # of what needs the engine,
NAMES = (404,)  # and of what may name a model, or a response
ANSWERS = (*READS, *NAMES, *SERVES)  # of what does all three


class Operation(msgspec.Struct, frozen=True):
    """One endpoint: path, handler, and the structs of its bodies."""

    method: str
    path: str  # as the router has it
    handler: Handler
    summary: str
    answer: Any = None  # the struct that 200 brings; None: text
    body: Any = None  # the struct that is sent
    streams: bool = False  # it can answer with events instead
    refusals: Sequence[int] = ()  # statuses that come as errors
    also: dict[int, Any] = {}  # other statuses, whose body is no error: their struct
    error: Any = ErrorBody  # the struct of refusals
    query: dict[str, str] = {}  # the types of parameters behind the path, none of which must be there

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")
