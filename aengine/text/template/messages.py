"""Brings a chat's messages into the plain form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypedDict

from aengine.errors import InvalidRequestError

_MAX_DEPTH = 64
_REASONING = ("reasoning_content", "thinking", "reasoning")

# Names that a request's `template_kwargs` may not set: the renderer's own arguments, and arguments of similar functions
# in other libraries. A caller would expect the effect that they have there.
RESERVED_NAMES = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "add_special_tokens",
    }
)


class TemplateOptions(TypedDict, total=False):
    """A request's options for its chat template, passed on from the API to `ChatTemplates.render`, which reads them."""

    template_kwargs: Mapping[str, Any] | None  # variables of the template
    add_generation_prompt: bool  # whether the text opens the assistant's next message; default: True
    continue_final_message: bool  # whether the text ends with the last message's content; default: False


class CallsLayout(NamedTuple):
    """How a template takes messages with calls.

    text_arguments: the arguments are JSON text, not an object. no_content: how a message without content has it.
    objects_only: it refuses arguments that are no object. Text that is no JSON becomes a value in one.
    """

    text_arguments: bool = False
    no_content: Literal["absent", "null", "empty"] = "absent"
    objects_only: bool = False


# Null is what transformers would pass. Qwen3's first templates and Granite's fail with it.
CALLS_LAYOUTS = tuple(
    CallsLayout(as_text, content) for as_text in (False, True) for content in ("absent", "null", "empty")
)


def plain_message(message: Mapping[str, Any], supports_developer: bool, layout: CallsLayout) -> dict[str, object]:
    """Return a message as templates expect it: no null fields, the reasoning under every name in use, arguments as
    objects.

    An answer without content and calls, for example one cut off in its thought, gets an empty text. The role
    `developer` becomes `system` if the template does not know it.
    """
    data = plain_data(message, "messages")
    if not isinstance(data, dict):
        raise InvalidRequestError("each message must be an object", "messages")
    data = {name: value for name, value in data.items() if value is not None}
    if data.get("role") == "developer" and not supports_developer:
        data["role"] = "system"
    calls = data.get("tool_calls")
    if data.get("role") == "assistant" and not calls:
        data.setdefault("content", "")
    if isinstance(calls, list):
        data["tool_calls"] = [_call(call, layout) for call in calls]
        if layout.no_content != "absent":
            data.setdefault("content", None if layout.no_content == "null" else "")
    reasoning = next((data[name] for name in _REASONING if name in data), None)
    return data if reasoning is None else {"thinking": reasoning, **data, "reasoning_content": reasoning}


def function_of(call: object) -> dict[str, Any] | None:
    """Return the function of a call or of a tool; None if it has another form."""
    function = call.get("function") if isinstance(call, dict) else None
    return function if isinstance(function, dict) else None


def arguments_text(function: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON text. Clients may send an object instead."""
    arguments = function.get("arguments")
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _call(call: object, layout: CallsLayout) -> object:
    """Return a call with its arguments in the layout. Clients may send JSON text or an object."""
    function = function_of(call)
    if not isinstance(call, dict) or function is None:
        return call
    arguments = function.get("arguments")
    if layout.text_arguments:
        arguments = arguments_text(function)
    elif isinstance(arguments, str):
        arguments = _object(arguments, layout.objects_only)
    else:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _object(text: str, needed: bool) -> object:
    """Return the object that is written as JSON. The text is the model's own mistake if it is none."""
    with suppress(ValueError, RecursionError):
        value = plain_data(json.loads(text or "{}"), "messages")
        if isinstance(value, dict):
            return value
    return {"arguments": text} if needed else text  # the model may see what it wrote


_EXACT: dict[type, Callable[[Any], object]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def plain_data(value: object, what: str, depth: int = 0) -> object:
    """Copy JSON-like data into plain types, the only ones that a template may touch.

    what: the field's name, for errors. Raises `InvalidRequestError` for other types.
    """
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"{what} is nested more than {_MAX_DEPTH} deep", what)
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind, exact in _EXACT.items():  # subclasses have methods of their own
        if isinstance(value, kind):
            return exact(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequestError(f"{what} holds an object with a key that is not a string", what)
        return {str.__str__(key): plain_data(item, what, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, what, depth + 1) for item in value]
    raise InvalidRequestError(f"{what} holds a {type(value).__name__}, which is not JSON", what)
