"""Lays a chat out for templates that look for tools' results in the message that calls, as Gemma 4's first ones do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Message = Mapping[str, object]


def with_tool_responses(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages of tools, as `tool_responses` of the assistant's message before them: all is one turn of the model.

    Such templates write a message's calls, then their results, then its content. So the answer that follows the results
    becomes that content, and what the assistant said before it called is a message of its own.
    """
    found: list[dict[str, object]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        end = at = at + 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        calls = message.get("tool_calls")
        if end == at or not isinstance(calls, list) or "tool_responses" in message:
            found.append(dict(message))
            continue
        said = {name: value for name, value in message.items() if name != "tool_calls"}
        results = [*_responses(calls, messages[at:end])]
        called: dict[str, object] = {"role": message.get("role"), "tool_calls": calls, "tool_responses": results}
        if said.get("content"):
            found.append(said)
        else:
            called = {**said, **called}
        at = end
        if at < len(messages) and messages[at].get("role") == "assistant" and not messages[at].get("tool_calls"):
            called = {**messages[at], **called, "content": messages[at].get("content")}
            at += 1
        found.append(called)
    return found


def _responses(calls: Sequence[object], results: Sequence[Message]) -> Iterator[dict[str, object]]:
    """Yield the results, each with the name of the function that was called."""
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    for place, result in zip(places(calls, results), results, strict=True):
        name = result.get("name") or (names[place] if names else None) or "unknown"
        yield {"name": name, "response": _text(result.get("content"))}


def places(calls: Sequence[object], results: Sequence[Message]) -> list[int]:
    """Return for each result the place of the call that it is of: the call that it names, or else the next one."""
    known: dict[object, int] = {}
    for place, call in enumerate(calls):
        if isinstance(call, dict) and isinstance(call.get("id"), str | int):
            known.setdefault(call["id"], place)
    found = []
    for at, result in enumerate(results):
        named, following = result.get("tool_call_id"), min(at, len(calls) - 1)
        found.append(known.get(named, following) if isinstance(named, str | int) else following)
    return found


def _text(content: object) -> object:
    """Parts of text as one."""
    if not isinstance(content, list):
        return "" if content is None else content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
