"""Lays a chat out for templates that look for tools in the system message, as Phi-4-mini's does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Message = Mapping[str, object]


def with_tools(messages: Sequence[Message], tools: Sequence[object]) -> list[dict[str, object]]:
    """The messages with the tools as a text of JSON in the first one, which is the system's."""
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    text = json.dumps(functions, ensure_ascii=False)
    first, others = messages[0], messages[1:]
    if first.get("role") != "system":
        first, others = {"role": "system", "content": ""}, messages
    return [{**first, "tools": text}, *map(dict, others)]


def with_written_calls(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages with calls as text, as such models write them: their templates do not know `tool_calls`."""
    return [_with_written_calls(message) for message in messages]


def _with_written_calls(message: Message) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    written = [
        {"name": function.get("name"), "arguments": function.get("arguments")}
        for function in functions
        if isinstance(function, Mapping)
    ]
    content = f"{message.get('content') or ''}functools{json.dumps(written, ensure_ascii=False)}"
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
