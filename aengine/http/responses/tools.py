"""Reads the tools of a request to `/v1/responses`. The model sees custom tools as functions.

The name of a tool in a namespace begins with the namespace's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aengine.errors import InvalidRequestError
from aengine.http.fields.messages import (
    AllowedTools,
    AllowedToolsChoice,
    ChosenFunction,
    ChosenTool,
    Function,
    Tool,
    ToolChoice,
)
from aengine.http.fields.tools import ToolUse, choose_tools
from aengine.http.responses.bodies import (
    MAX_TOOLS,
    NamedTool,
    ResponsesChoice,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
)

CUSTOM_ARGUMENT = "input"  # the only argument of a custom tool's function
_CALLABLE = ("function", "custom")
_SEARCH = "web_search"  # the prefix of all its versions


class CalledTool(NamedTuple):
    """How an answer names a called tool."""

    name: str
    namespace: str | None
    custom: bool  # the input is text


class ResponsesTools(NamedTuple):
    """The tools of a request, and their names for the client by their names for the model."""

    use: ToolUse
    called: dict[str, CalledTool]


def read_tools(body: ResponsesRequest) -> ResponsesTools:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises `InvalidRequestError`, naming the field.

    Web search is left out, because it is not supported; choosing it is refused.
    """
    tools: list[Tool] = []
    places: list[str] = []
    called: dict[str, CalledTool] = {}
    for tool, namespace, where in _flattened(body.tools or ()):
        if namespace is None and tool.type.startswith(_SEARCH):
            continue  # Codex offers it with every request
        function = _tool(tool, namespace, where)
        tools.append(function)
        places.append(where)
        called[function.function.name] = CalledTool(tool.name or "", namespace, tool.type == "custom")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools: there are {len(tools)} with those in namespaces, at most {MAX_TOOLS}", "tools"
        )
    use = choose_tools(
        tools,
        _choice(body.tool_choice, called),
        parallel=body.parallel_tool_calls is not False,
        place=places.__getitem__,
        chosen="tool_choice",
        allowed="tool_choice.tools[{}]",
    )
    return ResponsesTools(use, called)


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool for the model."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _flattened(tools: Sequence[ResponsesTool]) -> Iterator[tuple[ResponsesTool, str | None, str]]:
    """Yield each tool with its namespace and its place in the request."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "namespace":
            yield tool, None, where
            continue
        for field in ("name", "tools"):
            if getattr(tool, field) is None:
                raise InvalidRequestError(f"{where}.{field}: a namespace must have it", f"{where}.{field}")
        for inner, one in enumerate(tool.tools or ()):
            yield one, tool.name, f"{where}.tools[{inner}]"


def _tool(tool: ResponsesTool, namespace: str | None, where: str) -> Tool:
    if tool.type not in _CALLABLE:
        raise InvalidRequestError(
            f"{where}.type: {tool.type[:100]!r} is a tool that OpenAI's servers run themselves; here the client runs "
            "them: offer a tool of type function or custom, or leave it out",
            f"{where}.type",
        )
    if tool.name is None:
        raise InvalidRequestError(f"{where}.name: a tool of type {tool.type!r} must have it", f"{where}.name")
    name = full_name(namespace, tool.name)
    if tool.type == "function":
        return _function(name, tool, tool.parameters, tool.strict)
    text: dict[str, Any] = {"type": "string"}
    if (pattern := _pattern(tool, where)) is not None:
        text["pattern"] = pattern
    schema = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: text},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    return _function(name, tool, schema, strict=pattern is not None)


def _function(name: str, tool: ResponsesTool, parameters: dict[str, Any] | None, strict: bool | None) -> Tool:
    function = Function(name=name, description=tool.description, parameters=parameters, strict=strict)
    return Tool(type="function", function=function)


def _pattern(tool: ResponsesTool, where: str) -> str | None:
    """Return the regular expression for a custom tool's input; None allows any text."""
    form = tool.format
    if form is None or form.type == "text":
        return None
    path = f"{where}.format"
    if form.syntax != "regex":
        raise InvalidRequestError(
            f"{path}.syntax: only regex is supported, not a grammar in Lark's notation; send a format of type text, "
            "and describe the grammar to the model",
            f"{path}.syntax",
        )
    if form.definition is None:
        raise InvalidRequestError(f"{path}.definition: a grammar must have it", f"{path}.definition")
    return f"^(?:{form.definition})$"


def _choice(
    choice: ResponsesToolChoice | None, called: Mapping[str, CalledTool]
) -> Literal["none", "auto", "required"] | ToolChoice | None:
    if not isinstance(choice, ResponsesChoice):
        return choice
    if choice.type == "allowed_tools":
        for field in ("mode", "tools"):
            if getattr(choice, field) is None:
                path = f"tool_choice.{field}"
                raise InvalidRequestError(f"{path}: a choice of type allowed_tools must have it", path)
        named = [
            ChosenTool(function=_named(tool, f"tool_choice.tools[{index}]", called))
            for index, tool in enumerate(choice.tools or ())
        ]
        return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=named))
    return ChosenTool(function=_named(choice, "tool_choice", called))


def _named(choice: ResponsesChoice | NamedTool, where: str, called: Mapping[str, CalledTool]) -> ChosenFunction:
    if choice.type not in _CALLABLE:
        raise InvalidRequestError(
            f"{where}.type: {choice.type[:100]!r} is not supported; send the type function or custom",
            f"{where}.type",
        )
    if choice.name is None:
        raise InvalidRequestError(f"{where}.name: a choice of type {choice.type!r} must have it", f"{where}.name")
    name = full_name(choice.namespace, choice.name)
    tool = called.get(name)
    if tool is not None and tool.custom != (choice.type == "custom"):
        kind = "custom" if tool.custom else "function"
        raise InvalidRequestError(
            f"{where}.type: {choice.name!r} is a {kind} tool, not a {choice.type} one", f"{where}.type"
        )
    return ChosenFunction(name=name)
