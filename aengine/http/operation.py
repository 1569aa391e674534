"""The declaration of an endpoint. Its route and its entry in the OpenAPI document are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.entry.errors import ErrorBody

Handler = Callable[[Request], Awaitable[Response]]


# The statuses of errors, by what an endpoint does.
BODY_ERRORS = (400, 408, 413, 415)  # it reads a body
ENGINE_ERRORS = (503,)  # it needs the engine
NAME_ERRORS = (404,)  # its request names a model or a response, or a knob may switch it off
ALL_ERRORS = (*BODY_ERRORS, *NAME_ERRORS, *ENGINE_ERRORS)  # all of these


class Operation(msgspec.Struct, frozen=True):
    """One endpoint: path, handler, and the structs of its bodies."""

    method: str
    path: str  # in the router's notation
    handler: Handler
    summary: str
    answer: Any = None  # the struct of a 200; None: text
    body: Any = None  # the struct of the request
    streams: bool = False  # whether it can answer with events instead
    refusals: Sequence[int] = ()  # statuses of errors
    other_answers: dict[int, Any] = {}  # by status: structs of bodies that are neither a 200's nor an error's
    error: Any = ErrorBody  # the struct of errors
    query: dict[str, str] = {}  # by name: the types of optional query parameters

    @property
    def template(self) -> str:
        """The path in OpenAPI's notation."""
        return self.path.replace(":path}", "}")
