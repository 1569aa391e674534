"""The wire format: encodes requests, decodes events and chunks, and turns error bodies into exceptions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from aengine.errors import (
    AdapterError,
    AengineError,
    CheckpointError,
    ContextLengthError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    RequestAbortedError,
    ServerError,
    WeightsError,
)
from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured
from aengine.types import FinishReason, Fragment, PromptLogprob, TokenLogprob, ToolCallDelta, Usage

DONE = "[DONE]"
_DEFAULT_PARAMS = SamplingParams()  # of requests without sampling parameters


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class WireUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0  # absent if no token is drawn
    prompt_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, self.prompt_tokens_details.cached_tokens)


class WireError(msgspec.Struct):
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class WireCandidate(msgspec.Struct):
    logprob: float | None  # None: minus infinity, which JSON cannot write
    rank: int


class WireEvent(msgspec.Struct):
    """One event of `/generate`, or the error that ends the stream."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: list[dict[int, WireCandidate] | None] | None = None  # by token id, the prompt's own first
    stop_string: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    usage: WireUsage | None = None
    error: WireError | None = None


class ErrorDocument(msgspec.Struct):
    error: WireError


_HEADER_TEXT = re.compile(r"[!-~]{1,128}")  # visible ASCII
_IMAGE = re.compile(r"(?P<part>messages\[\d+\]\.content\[\d+\])\.(image_url|type)")
_event_decoder = msgspec.json.Decoder(WireEvent)
_error_decoder = msgspec.json.Decoder(ErrorDocument)


def read_event(data: str, params: SamplingParams) -> Fragment:
    """Decode an event into a fragment. params: those of the request.

    Raises the error in the event, or `ServerError` if it is not an event of aengine.
    """
    try:
        event = _event_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ServerError(f"the server sent an event that cannot be read: {error}") from None
    if event.error is not None:
        raise request_error(event.error, None, None, params)
    return Fragment(
        event.text,
        event.token_ids,
        event.logprobs,
        event.finish_reason,
        None if event.usage is None else event.usage.usage(),
        event.index,
        None if event.prompt_logprobs is None else _prompt_logprobs(event.prompt_logprobs, params.prompt_logprobs or 0),
        event.stop_string,
        event.reasoning,
        event.tool_calls,
    )


def _prompt_logprobs(positions: list[dict[int, WireCandidate] | None], top: int) -> list[PromptLogprob]:
    """Return the logprobs of all positions except the first, which has none."""
    return [_prompt_logprob(candidates, top) for candidates in positions if candidates]


def _prompt_logprob(candidates: dict[int, WireCandidate], top: int) -> PromptLogprob:
    """Return the logprob of one position from its candidates by token id.

    The first candidate is the prompt's own token. If it is also one of the `top` likeliest, it is not listed again.
    """
    ids = list(candidates)
    values = [-math.inf if one.logprob is None else one.logprob for one in candidates.values()]
    own, logprob, rank = ids[0], values[0], candidates[ids[0]].rank
    del ids[0], values[0]
    if len(ids) < top:  # it is one of the likeliest; its rank is ambiguous among equally likely tokens
        others = (candidates[one].rank for one in ids)
        place = next((place for place, other in enumerate(others) if other != place + 1), len(ids))
        ids.insert(place, own)
        values.insert(place, logprob)
    return PromptLogprob(own, logprob, rank, ids, values)


def read_chunk(data: str, params: SamplingParams) -> dict[str, Any]:
    """Decode a chunk of OpenAI's API. Raises the error in it, or `ServerError` if it is not a chunk."""
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ServerError(f"the server sent an event that cannot be read: {error}") from None
    if isinstance(chunk, dict) and "error" in chunk:
        raise request_error(msgspec.convert(chunk, ErrorDocument).error, None, None, params)
    if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
        raise ServerError("the server sent an event that is not a chunk of a chat")
    return chunk


def response_error(
    status: int, body: bytes, headers: Mapping[str, str], params: SamplingParams = _DEFAULT_PARAMS
) -> AengineError:
    """Return the exception for a response with an error status."""
    try:
        wire_error = _error_decoder.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ServerError(f"the server answered {status} without an error body of aengine", status)
    return request_error(wire_error, status, headers.get("retry-after"), params)


def request_error(
    wire_error: WireError, status: int | None, retry_after: str | None, params: SamplingParams = _DEFAULT_PARAMS
) -> AengineError:
    """Return the exception that an engine in this process would raise for the same error, with our parameter names."""
    message, param = wire_error.message, wire_error.param
    if param is not None and param.startswith("structured_outputs"):  # the name here is `structured`
        if (form := params.structured) is not None:
            message, param = (text.replace(f"structured_outputs.{form.kind}", form.param) for text in (message, param))
        message, param = (text.replace("structured_outputs", "structured") for text in (message, param))
    elif param is not None and param.startswith("input_ids["):
        message, param = message.replace("input_ids[", "prompt["), "prompt"
    elif param is not None and re.match(r"input\b", param):  # of embeddings: called prompts here
        message, param = re.sub(r"\binput\b", "prompt", message.removeprefix("input: ")), "prompt"
    elif param is not None and (part := _IMAGE.fullmatch(param)):  # the engine names parts, not their fields
        message, param = message.replace(param, part["part"], 1), "messages"
    elif param == "input_ids":  # called prompt here
        message, param = message.removeprefix("input_ids: ").replace("input_ids", "prompt"), "prompt"
    match wire_error.code:
        case "context_length_exceeded":
            return ContextLengthError(message, param)
        case "model_not_found":
            return ModelNotFoundError(message)
        case "adapter_refused":
            return AdapterError(message)
        case "weights_refused":
            return WeightsError(message)
        case "chat_template_refused":
            return CheckpointError(message)
        case "queue_full":
            return QueueFullError(message, float(retry_after) if retry_after and retry_after.isdigit() else 1.0)
        case "not_ready":
            return EngineNotReadyError(message)
        case "aborted":
            return RequestAbortedError(message)
        case "shutting_down":
            return EngineClosedError(message)
        case "engine_failed" | "internal_error":
            return EngineFailedError(message)
        case None if wire_error.type == "invalid_request_error" and status in (None, 400):
            return InvalidRequestError(message, param)
    return ServerError(message, status, wire_error.code)


def request_body(
    prompt: Mapping[str, Any], params: SamplingParams, names: Iterable[str], routing: Mapping[str, Any]
) -> bytes:
    """Return the body of a streamed request: the fields of `prompt` and `routing`, and the parameters in `names`.

    Raises `InvalidRequestError` if JSON cannot represent a value.
    """
    body = {**prompt, **routing, "stream": True}
    for name in names:
        value = getattr(params, name)
        if isinstance(value, Structured):
            further = {"thought": value.thought, "calls": value.calls, "strict": value.strict}
            body["structured_outputs"] = {value.kind: getattr(value, value.kind), **further}
        else:
            body[name] = value
    return request_json(body)


def check_request_id(request_id: object) -> str:
    """Return the id. Raises `InvalidRequestError` unless it can be a header's value."""
    if not isinstance(request_id, str) or not _HEADER_TEXT.fullmatch(request_id):
        raise InvalidRequestError("request_id must be 1 to 128 visible ASCII characters", "request_id")
    return request_id


def request_json(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON. Raises `InvalidRequestError` if JSON cannot represent a value."""
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.EncodeError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from None
