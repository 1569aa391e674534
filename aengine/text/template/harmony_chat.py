"""Lays a chat out as the chat template of gpt-oss reads it: one call a message, and its result behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aengine.text.template.tool_responses import places

Message = Mapping[str, object]

_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # the model knows low, medium and high


def harmony_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages with several calls taken apart. The template would leave out all but the first one, and take every
    result for that one's. Where calls come with content and a thought, which it refuses, the content joins the thought:
    it would write either in the same place.
    """
    found: list[dict[str, object]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            found.append({name: value for name, value in message.items() if name != "tool_calls"})
            continue
        end = at
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        found += _one_by_one(_of_one_kind(message), calls, messages[at:end])
        at = end
    return found


def harmony_tools(tools: Sequence[object]) -> list[object]:
    """The tools, each with a description: the template cannot do without."""
    return [_described(tool) for tool in tools]


def harmony_kwargs(kwargs: Mapping[str, object]) -> dict[str, object]:
    """The template's variables, with an effort that the model knows."""
    effort = kwargs.get("reasoning_effort")
    known = _EFFORTS.get(effort) if isinstance(effort, str) else None
    return {**kwargs} if known is None else {**kwargs, "reasoning_effort": known}


def _one_by_one(
    message: dict[str, object], calls: list[object], results: Sequence[Message]
) -> Iterator[dict[str, object]]:
    found: list[list[Message]] = [[] for _ in calls]
    for place, result in zip(places(calls, results), results, strict=True):
        found[place].append(result)
    for index, call in enumerate(calls):
        yield {**(message if index == 0 else {"role": message["role"]}), "tool_calls": [call]}
        yield from map(dict, found[index])


def _of_one_kind(message: Message) -> dict[str, object]:
    content, thinking = message.get("content"), message.get("thinking")
    if not (isinstance(content, str) and content and isinstance(thinking, str) and thinking):
        return dict(message)
    return {**message, "content": "", "thinking": f"{thinking}\n\n{content}"}


def _described(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}
