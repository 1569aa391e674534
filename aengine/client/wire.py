"""What goes over the wire: requests as `/generate` takes them, its events, and errors made into exceptions again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from aengine.errors import (
    AengineError,
    CheckpointError,
    ContextLengthError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    ServerError,
)
from aengine.structured import Structured
from aengine.types import FinishReason, Fragment, SamplingParams, TokenLogprob, Usage

DONE = b"[DONE]"


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class WireUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, self.prompt_tokens_details.cached_tokens)


class WireError(msgspec.Struct):
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class WireEvent(msgspec.Struct):
    """One event of `/generate`, or the error that ends the stream."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    usage: WireUsage | None = None
    error: WireError | None = None


class ErrorDocument(msgspec.Struct):
    error: WireError


_event_decoder = msgspec.json.Decoder(WireEvent)
_error_decoder = msgspec.json.Decoder(ErrorDocument)


def read_event(data: bytes) -> Fragment:
    """A fragment. Raises the error that the event tells of, `ServerError` for what is not an event of ours."""
    try:
        event = _event_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerError(f"the server sent an event that cannot be read: {error}") from None
    if event.error is not None:
        raise told_error(event.error, None, None)
    return Fragment(
        event.text,
        event.token_ids,
        event.logprobs,
        event.finish_reason,
        None if event.usage is None else event.usage.usage(),
        event.index,
    )


def read_chunk(data: bytes) -> dict[str, Any]:
    """A chunk of OpenAI's. Raises the error that it tells of, `ServerError` for what is no chunk."""
    try:
        chunk = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerError(f"the server sent an event that cannot be read: {error}") from None
    if isinstance(chunk, dict) and "error" in chunk:
        raise told_error(msgspec.convert(chunk, ErrorDocument).error, None, None)
    if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
        raise ServerError("the server sent an event that is no chunk of a chat")
    return chunk


def refusal(status: int, body: bytes, headers: Mapping[str, str]) -> AengineError:
    """The exception for an answer that is not a success."""
    try:
        told = _error_decoder.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ServerError(f"the server answered {status}, in words that are not aengine's", status)
    return told_error(told, status, headers.get("retry-after"))


def told_error(told: WireError, status: int | None, retry_after: str | None) -> AengineError:
    """The exception that an engine in this process would have raised, as far as there is one."""
    message, param = told.message, told.param
    if param is not None and param.startswith("structured_outputs"):  # called `structured` on this side
        message, param = (text.replace("structured_outputs", "structured") for text in (message, param))
    elif param == "input_ids":  # on this side a prompt like any other
        message, param = message.removeprefix("input_ids: ").replace("input_ids", "prompt"), "prompt"
    match told.code:
        case "context_length_exceeded":
            return ContextLengthError(message, param)
        case "model_not_found":
            return ModelNotFoundError(message)
        case "chat_template_refused":
            return CheckpointError(message)
        case "queue_full":
            return QueueFullError(message, float(retry_after) if retry_after and retry_after.isdigit() else 1.0)
        case "not_ready":
            return EngineNotReadyError(message)
        case "shutting_down":
            return EngineClosedError(message)
        case "engine_failed" | "internal_error":
            return EngineFailedError(message)
        case None if told.type == "invalid_request_error" and status in (None, 400):
            return InvalidRequestError(message, param)
    return ServerError(message, status, told.code)


def request_body(
    prompt: Mapping[str, Any], params: SamplingParams, names: Iterable[str], routing: Mapping[str, Any]
) -> bytes:
    """The body of `/generate`: `prompt` as its fields, and the fields `names` of the parameters.

    Raises `InvalidRequestError` for what JSON cannot say.
    """
    body = {**prompt, **routing, "fill_context": True, "stream": True}
    for name in names:
        value = getattr(params, name)
        if isinstance(value, Structured):
            body["structured_outputs"] = {value.kind: getattr(value, value.kind)}
        else:
            body[name] = value
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.EncodeError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from None
