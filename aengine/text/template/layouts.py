"""Rearranges chats for templates that expect calls, results or tools in special places."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from aengine.text.template.messages import arguments_text, function_of

Message = Mapping[str, object]


def with_tool_responses(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Move the results of tools into `tool_responses` of the assistant's message before them, as Gemma 4's first
    templates need.

    Such templates write a message's calls, then their results, then its content. So the answer after the results
    becomes that content. What the assistant said before it called becomes a message of its own.
    """
    found: list[dict[str, object]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        end = _end_of_results(messages, at)
        calls = message.get("tool_calls")
        if end == at or not isinstance(calls, list) or "tool_responses" in message:
            found.append(dict(message))
            continue
        said = _without_calls(message)
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
    names = [None if (function := function_of(call)) is None else function.get("name") for call in calls]
    for place, result in zip(call_indices(calls, results), results, strict=True):
        name = result.get("name") or (names[place] if names else None) or "unknown"
        yield {"name": name, "response": _text(result.get("content"))}


def call_indices(calls: Sequence[object], results: Sequence[Message]) -> list[int]:
    """Return for each result the index of its call: the call that it names, or else the next one."""
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
    """Join parts of text."""
    if not isinstance(content, list):
        return "" if content is None else content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # the model knows low, medium and high


def harmony_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Put each call into a message of its own, followed by its results, as gpt-oss's template needs.

    The template writes only the first call of a message, and treats every result as that call's. It refuses a message
    with calls that has content and a thought: it writes only one of them. So the content joins the thought.
    """
    return with_single_calls(
        [_with_content_in_thought(message) if message.get("tool_calls") else message for message in messages]
    )


def with_single_calls(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Put each call into a message of its own, followed by its results, as Llama 3's templates need."""
    found: list[dict[str, object]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            found.append(_without_calls(message))
            continue
        end = _end_of_results(messages, at)
        found += _one_by_one(message, calls, messages[at:end])
        at = end
    return found


def harmony_kwargs(kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the template's variables, with an effort that the model knows."""
    effort = kwargs.get("reasoning_effort")
    known = _EFFORTS.get(effort) if isinstance(effort, str) else None
    return {**kwargs} if known is None else {**kwargs, "reasoning_effort": known}


def _one_by_one(message: Message, calls: list[object], results: Sequence[Message]) -> Iterator[dict[str, object]]:
    further = {"role": message["role"], **({"content": ""} if "content" in message else {})}
    found: list[list[Message]] = [[] for _ in calls]
    for place, result in zip(call_indices(calls, results), results, strict=True):
        found[place].append(result)
    for index, call in enumerate(calls):
        yield {**(message if index == 0 else further), "tool_calls": [call]}
        yield from map(dict, found[index])


def _with_content_in_thought(message: Message) -> dict[str, object]:
    content, thinking = message.get("content"), message.get("thinking")
    if not (isinstance(content, str) and content and isinstance(thinking, str) and thinking):
        return dict(message)
    return {**message, "content": "", "thinking": f"{thinking}\n\n{content}"}


def with_observations(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Make each call a message with the name as its metadata, and each result an observation, as GLM-4's templates
    need.
    """
    found: list[dict[str, object]] = []
    for message in messages:
        said = _without_calls(message)
        if said.get("role") == "tool":
            said["role"] = "observation"
        calls = message.get("tool_calls")
        calls = calls if isinstance(calls, list) else []
        if said.get("content") or not calls:
            found.append(said)
        for call in calls:
            if (function := function_of(call)) is not None:
                content = arguments_text(function)
                found.append({"role": "assistant", "metadata": function.get("name"), "content": content})
    return found


def with_tools(messages: Sequence[Message], tools: Sequence[object], *, listed: bool) -> list[dict[str, object]]:
    """Put the tools into the system message, which comes first: as JSON, as Phi-4-mini's template needs, or if
    `listed` as a list, as GLM-4's first template needs.
    """
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    offered = list(tools) if listed else json.dumps(functions, ensure_ascii=False)
    first, others = messages[0], messages[1:]
    if first.get("role") != "system":
        first, others = {"role": "system", "content": ""}, messages
    return [{**first, "tools": offered}, *map(dict, others)]


def with_written_calls(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Write calls as text, in the notation of Phi-4-mini, for templates that do not know `tool_calls`."""
    return [_with_written_calls(message) for message in messages]


def _with_written_calls(message: Message) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    written = [
        {"name": function.get("name"), "arguments": function.get("arguments")}
        for call in calls
        if (function := function_of(call)) is not None
    ]
    content = f"{message.get('content') or ''}functools{json.dumps(written, ensure_ascii=False)}"
    return _without_calls(message) | {"content": content}


def with_lfm2_calls(messages: Sequence[Message], begin: str, end: str) -> list[dict[str, object]]:
    """Write calls before the content, in LFM2's notation, for its templates, which do not know `tool_calls`.

    begin, end: the texts around the calls of a message.
    """
    return [_with_lfm2_calls(message, begin, end) for message in messages]


def _with_lfm2_calls(message: Message, begin: str, end: str) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    functions = (function for call in calls if (function := function_of(call)) is not None)
    written = ", ".join(f"{one.get('name')}({_python_arguments(one.get('arguments'))})" for one in functions)
    return _without_calls(message) | {"content": f"{begin}[{written}]{end}{_text(message.get('content'))}"}


def _python_arguments(arguments: object) -> str:
    if not isinstance(arguments, dict):  # not JSON: the model's own mistake
        return "" if arguments is None else str(arguments)
    return ", ".join(f"{name}={_python(value)}" for name, value in arguments.items())


def _python(value: object) -> str:
    """Return JSON-like data as Python's notation."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(name)}: {_python(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _without_calls(message: Message) -> dict[str, object]:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _end_of_results(messages: Sequence[Message], at: int) -> int:
    """Return the place after the results of tools that begin at `at`."""
    while at < len(messages) and messages[at].get("role") == "tool":
        at += 1
    return at
