"""Errors in the shape of Anthropic's API, for the paths of its Messages API: `{"type": "error", "error": {"type",
"message"}, "request_id"}`.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from starlette.types import Scope

OVERLOADED = 529  # no standard status, but the one that Anthropic's clients know for a server with too much to do
REQUEST_ID = "aengine.request_id"  # in the ASGI scope: what the answer has as `X-Request-Id` and `request-id`
ANTHROPIC_PATHS = re.compile(r"/*(?:v1/+){0,2}messages(?:/.*)?", re.DOTALL)  # aliases and all below
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    OVERLOADED: "overloaded_error",
}
# By field: codes on which a client acts. With this one its tool runner, which asks for a thread first, sends the whole
# conversation instead, from then on.
_CODES = {"thread": "thread_unsupported_request"}


class MessagesErrorCode(msgspec.Struct, frozen=True):
    error_code: str


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: MessagesErrorCode | msgspec.UnsetType = msgspec.UNSET


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None = None


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the request is for a path of Anthropic's, served or not."""
    return ANTHROPIC_PATHS.fullmatch(scope.get("path", "")) is not None


def messages_error_body(status: int, message: str, param: str | None, scope: Scope) -> MessagesErrorBody:
    """The JSON body of an error that is answered with this status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = MessagesErrorCode(_CODES[param]) if param in _CODES else msgspec.UNSET
    return MessagesErrorBody(error=MessagesErrorDetail(kind, message, details), request_id=scope.get(REQUEST_ID))
