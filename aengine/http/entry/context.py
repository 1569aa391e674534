"""The context of one request, which middleware and endpoints share through its ASGI scope."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope, Send

from aengine.errors import AengineError

_KEY = "aengine"  # in the ASGI scope
_ANTHROPIC_PATHS = re.compile(r"/*(?:v1/+){0,2}messages(?:/.*)?", re.DOTALL)  # aliases and all paths below


class Abortable(Protocol):
    """The engine's work for a request."""

    @property
    def id(self) -> str: ...

    def abort(self) -> bool | None:
        """End the work. Returns False if there was none."""
        ...


@dataclass(slots=True)
class RequestContext:
    """The state of one request that middleware and endpoints share."""

    request_id: str | None = None  # the answer's `X-Request-Id`
    caller: str | None = None  # the digest of the API key, if the server asks for keys
    client_left: bool = False
    work: Abortable | None = None  # set while the engine works for the request
    # Sends the messages between the first and the last one. It bypasses the middleware, which would not change them.
    send_piece: Send | None = None
    disconnect: Callable[[AengineError], None] | None = None  # closes the connection; the error is for the client
    cancel_error: AengineError | None = None  # why the request was cancelled, for the client


def context_of(scope: Scope) -> RequestContext:
    """Return the context in the scope, or put a new one there."""
    context: RequestContext | None = scope.get(_KEY)
    if context is None:
        context = scope[_KEY] = RequestContext()
    return context


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the request is for a path of Anthropic's API, served or not."""
    return _ANTHROPIC_PATHS.fullmatch(scope.get("path", "")) is not None


def id_headers(scope: Scope) -> dict[str, str]:
    """Return the answer's headers with the request's id. Anthropic's clients read it under another name as well."""
    own = {"x-request-id": context_of(scope).request_id or ""}
    if _ANTHROPIC_PATHS.fullmatch(scope["path"]):
        own["request-id"] = own["x-request-id"]
    return own
