"""Answers one line of a file of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import anyio
import msgspec

from aengine.cli.images import Part, user_message
from aengine.cli.model import Model
from aengine.errors import (
    AengineError,
    EngineClosedError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    ServerError,
)
from aengine.requests.sampling_params import NAMES
from aengine.types import Choice, Completion


class Result(msgspec.Struct):
    """One line of output."""

    body: dict[str, Any]
    failed: bool = False
    tokens: int = 0


async def answer_line(
    model: Model,
    defaults: dict[str, Any],
    line: int,
    text: bytes,
    *,
    plain: bool,
    ids: bool,
    images: Sequence[Part] = (),
) -> Result:
    """Return the result of one line. An error of this line is its result. An error that ends the run is raised.

    images: go with a prompt, which becomes the message of a chat.
    """
    head: dict[str, Any] = {"line": line}
    try:
        fields = _fields(text, plain)
        if images:
            fields = _with_images(fields, images)
        if "id" in fields:
            head["id"] = fields.pop("id")
        completion = await _retry_while_full(model, defaults | fields)
    except (EngineClosedError, EngineNotReadyError):
        raise
    except AengineError as error:
        if isinstance(error, ServerError) and error.status is None:
            raise  # the server cannot be reached
        failure = {"message": str(error), "param": getattr(error, "param", None)}
        return Result({**head, "error": failure}, failed=True)
    usage = completion.usage
    first, *others = (_choice(choice, ids) for choice in completion.choices)
    body = {**head, **first} | ({"choices": [first, *others]} if others else {})
    body["usage"] = {**msgspec.to_builtins(usage), "total_tokens": usage.total_tokens}
    return Result(body, tokens=usage.completion_tokens)


def _fields(text: bytes, plain: bool) -> dict[str, Any]:
    """Return a line's fields as arguments of `complete` or `chat`. Raises `InvalidRequestError`."""
    try:
        value = text.decode() if plain else msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if plain:
            raise InvalidRequestError(f"the line is not UTF-8: {error}") from None
        raise InvalidRequestError(f"the line is not valid JSON ({error}); with --text every line is a prompt") from None
    if isinstance(value, (str, list)):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InvalidRequestError(
            "the line must be a prompt, an object with either prompt or messages, or a request of a batch file, with "
            "custom_id, method, url and body"
        )
    known = _CHAT_FIELDS if "messages" in value else _PROMPT_FIELDS
    for name in value:
        if name not in known:
            close = get_close_matches(name, known, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise InvalidRequestError(f"unknown field {name!r}{meant}; known are {', '.join(known)}", name)
    return value


def _with_images(fields: dict[str, Any], images: Sequence[Part]) -> dict[str, Any]:
    """Return the fields of a prompt as those of a chat."""
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str):
        raise InvalidRequestError(
            "with --image, the line must be a prompt that is text; the images of messages are parts of their content",
            "prompt",
        )
    return {**fields, "messages": [user_message(prompt, images)]}


_COMMON_FIELDS = (*NAMES, "priority", "cache_salt", "adapter", "id")
_PROMPT_FIELDS = ("prompt", *_COMMON_FIELDS)
_CHAT_FIELDS = ("messages", "tools", "template_kwargs", "continue_final_message", *_COMMON_FIELDS)


async def _retry_while_full(model: Model, fields: dict[str, Any]) -> Completion:
    """Complete a prompt. If the queue is full of other requests, wait and try again."""
    while True:
        try:
            if "messages" in fields:
                return await model.chat(**fields)
            return await model.complete(**fields)
        except QueueFullError as error:
            await anyio.sleep(error.retry_after)


def _choice(choice: Choice, ids: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"text": choice.text, "finish_reason": choice.finish_reason}
    if ids:
        body["token_ids"] = choice.token_ids
    if choice.logprobs is not None:
        body["logprobs"] = choice.logprobs
    if choice.reasoning:
        body["reasoning"] = choice.reasoning
    if choice.tool_calls:
        body["tool_calls"] = choice.tool_calls
    return body
