"""Errors as JSON: in OpenAI's format, and in Anthropic's format on the paths of its API.

OpenAI: `{"error": {"message", "type", "param", "code"}}`.
Anthropic: `{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler, Receive, Scope, Send

from aengine.errors import (
    AdapterError,
    AengineError,
    CheckpointError,
    ContextLengthError,
    EngineClosedError,
    EngineNotReadyError,
    HubError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    RequestAbortedError,
)
from aengine.http.entry.context import context_of, id_headers, speaks_anthropic

# The folders of a path. A slash does not start a path inside a word (a model id), after another slash (a URL) or after
# an HTTP method (an endpoint).
_FOLDERS = re.compile(r"(?<![\w./:-])(?<!GET )(?<!POST )(?:~|[A-Za-z]:)?[/\\](?=[^\s/\\])(?:[^/\\\s'\"`]+[/\\])*")
OVERLOADED = 529  # not a standard status; Anthropic's clients expect it from an overloaded server
MAX_MESSAGE = 2000  # characters
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    OVERLOADED: "overloaded_error",
}
# By field: error codes that clients act on. Anthropic's tool runner first asks for a thread. After this code it sends
# the whole conversation with each request.
_CODES = {"thread": "thread_unsupported_request"}


def public_message(error: BaseException) -> str:
    """Return the message for clients: aengine's own messages without folders, and only the type of other errors."""
    if isinstance(error, (InvalidRequestError, ModelNotFoundError)):
        return str(error)  # any path in it is from the request
    if isinstance(error, AengineError):
        return _FOLDERS.sub("", str(error))
    return f"internal error ({type(error).__name__}); the server's log has the details"


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


def messages_error_body(status: int, message: str, param: str | None, scope: Scope) -> MessagesErrorBody:
    """Return the JSON body of an error with this status in Anthropic's format."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = MessagesErrorCode(_CODES[param]) if param in _CODES else msgspec.UNSET
    return MessagesErrorBody(error=MessagesErrorDetail(kind, message, details), request_id=context_of(scope).request_id)


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class HTTPError(AengineError):
    """A refusal with its own status and code, such as of a media type, a size or an origin."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def status_of(error: BaseException) -> int:
    """Return the HTTP status for an error."""
    match error:
        case HTTPError():
            return error.status
        case HTTPException():
            return error.status_code
        case InvalidRequestError() | CheckpointError():  # a chat template's error: a retry fails as well
            return 400
        case RequestAbortedError():  # 4xx, so that clients do not retry by themselves
            return 400
        case ModelNotFoundError():
            return 404
        case QueueFullError() | EngineNotReadyError() | EngineClosedError():
            return 503
        case _:
            return 500


def error_body(error: BaseException) -> ErrorBody:
    """Return the JSON body of an error, without tracebacks, folders or messages of other libraries."""
    kind = "invalid_request_error" if status_of(error) < 500 or status_of(error) == 505 else "server_error"
    message, param, code = public_message(error), None, None
    match error:
        case HTTPError():
            message, code = str(error), error.code  # its text has no paths but those of the request
        case HTTPException():
            message = error.detail
        case ContextLengthError():
            param, code = error.param, "context_length_exceeded"
        case InvalidRequestError():
            param = error.param
        case AdapterError() | HubError():
            param, code = "lora_path", "adapter_refused"
        case CheckpointError():
            param, code = "messages", "chat_template_refused"
        case ModelNotFoundError():
            param, code = "model", "model_not_found"
        case QueueFullError():
            code = "queue_full"
        case EngineNotReadyError():
            code = "not_ready"
        case RequestAbortedError():
            code = "aborted"
        case EngineClosedError():
            code = "shutting_down"
        case _:
            code = "engine_failed" if isinstance(error, AengineError) else "internal_error"
    return ErrorBody(ErrorDetail(_shortened(message), kind, None if param is None else _shortened(param), code))


def error_body_for(scope: Scope, error: BaseException) -> tuple[int, ErrorBody | MessagesErrorBody]:
    """Return the status of an error, and its body in the format of the request's API."""
    status, body = status_of(error), error_body(error)
    if not speaks_anthropic(scope):
        return status, body
    if isinstance(error, QueueFullError):
        status = OVERLOADED
    message = body.error.message
    if isinstance(error, ContextLengthError) and error.param != "max_tokens":
        message = f"prompt is too long: {message}"  # clients recognise these words and shorten the history
    return status, messages_error_body(status, message, body.error.param, scope)


def _shortened(text: str) -> str:
    """Shorten the message: errors repeat parts of the request, which may be megabytes."""
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


class ErrorResponse(Response):
    """The response to a request that failed before its answer began.

    It derives from `Response` only because Starlette's handlers return one.
    """

    def __init__(self, error: BaseException, headers: Mapping[str, str]) -> None:
        self.background = None
        self._error = error
        self._sent = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = error_body_for(scope, self._error)
        response = Response(msgspec.json.encode(body), status, self._sent, "application/json")
        await response(scope, receive, send)


def error_response(error: BaseException, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to a failed request, with the headers of its kind of error."""
    sent = dict(headers or {})
    if isinstance(error, QueueFullError):
        sent["Retry-After"] = str(max(1, round(error.retry_after)))
    elif status_of(error) == 503:  # it will be ready later, or another server will replace it
        sent["Retry-After"] = "1"
    return ErrorResponse(error, sent)


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(error, error.headers if isinstance(error, HTTPException) else None)


async def _answer_bug(request: Request, error: Exception) -> Response:
    # This handler runs outside of `EntryMiddleware`, which adds the headers to all other answers.
    return error_response(error, id_headers(request.scope))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never sent: the client left before its request was read


HANDLERS: Mapping[type[Exception], ExceptionHandler] = {
    AengineError: _answer,
    HTTPException: _answer,
    ClientDisconnect: _client_gone,
    Exception: _answer_bug,  # Starlette re-raises it after the answer, so that the server logs the traceback
}
