"""Reads the tools of a request to `/v1/responses`: functions, and custom tools, which the model gets as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from aengine.errors import InvalidRequestError
from aengine.http.bodies.chat import (
    AllowedTools,
    AllowedToolsChoice,
    ChosenFunction,
    ChosenTool,
    Function,
    Tool,
    ToolChoice,
)
from aengine.http.bodies.responses_api.request import ResponsesRequest
from aengine.http.bodies.responses_api.tools import NamedTool, ResponsesChoice, ResponsesTool, ResponsesToolChoice
from aengine.http.openai.tools import ToolUse, choose_tools

CUSTOM_ARGUMENT = "input"  # of the function that a custom tool is to the model
_CALLABLE = ("function", "custom")


class ResponsesTools(NamedTuple):
    """The tools of a request, and the names of those of them whose input is text."""

    use: ToolUse
    custom: frozenset[str]


def read_tools(body: ResponsesRequest) -> ResponsesTools:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises `InvalidRequestError`, naming the field."""
    given = body.tools or []
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    use = choose_tools(
        tools,
        _choice(body.tool_choice, given),
        parallel=body.parallel_tool_calls is not False,
        place="tools[{}]",
        chosen="tool_choice",
        allowed="tool_choice.tools[{}]",
    )
    return ResponsesTools(use, frozenset(tool.name for tool in given if tool.type == "custom" and tool.name))


def _tool(tool: ResponsesTool, where: str) -> Tool:
    if tool.type not in _CALLABLE:
        raise InvalidRequestError(
            f"{where}.type: {tool.type[:100]!r} is a tool that OpenAI's servers run themselves; here the client runs "
            "them: offer a tool of type function or custom, or leave it out",
            f"{where}.type",
        )
    if tool.name is None:
        raise InvalidRequestError(f"{where}.name: a tool of type {tool.type!r} must have it", f"{where}.name")
    if tool.type == "function":
        return Tool(type="function", function=_function(tool, tool.parameters, tool.strict))
    text: dict[str, Any] = {"type": "string"}
    if (pattern := _pattern(tool, where)) is not None:
        text["pattern"] = pattern
    schema = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: text},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    return Tool(type="function", function=_function(tool, schema, strict=pattern is not None))


def _function(tool: ResponsesTool, parameters: dict[str, Any] | None, strict: bool | None) -> Function:
    return Function(name=tool.name or "", description=tool.description, parameters=parameters, strict=strict)


def _pattern(tool: ResponsesTool, where: str) -> str | None:
    """The regular expression of a custom tool's input; None where any text will do."""
    form = tool.format
    if form is None or form.type == "text":
        return None
    path = f"{where}.format"
    if form.syntax != "regex":
        raise InvalidRequestError(
            f"{path}.syntax: inputs are held to a regex, not to a grammar in Lark's notation; describe it to the model "
            "with a format of type text",
            f"{path}.syntax",
        )
    if form.definition is None:
        raise InvalidRequestError(f"{path}.definition: a grammar must have it", f"{path}.definition")
    return f"^(?:{form.definition})$"


def _choice(
    choice: ResponsesToolChoice | None, tools: Sequence[ResponsesTool]
) -> Literal["none", "auto", "required"] | ToolChoice | None:
    if not isinstance(choice, ResponsesChoice):
        return choice
    types = {tool.name: tool.type for tool in tools}
    if choice.type == "allowed_tools":
        for field in ("mode", "tools"):
            if getattr(choice, field) is None:
                path = f"tool_choice.{field}"
                raise InvalidRequestError(f"{path}: a choice of type allowed_tools must have it", path)
        named = [
            ChosenTool(function=_named(tool, f"tool_choice.tools[{index}]", types))
            for index, tool in enumerate(choice.tools or ())
        ]
        return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=named))
    return ChosenTool(function=_named(choice, "tool_choice", types))


def _named(choice: ResponsesChoice | NamedTool, where: str, types: dict[str | None, str]) -> ChosenFunction:
    if choice.type not in _CALLABLE:
        raise InvalidRequestError(
            f"{where}.type: {choice.type[:100]!r} is no tool that is offered; there are functions and custom tools",
            f"{where}.type",
        )
    if choice.name is None:
        raise InvalidRequestError(f"{where}.name: a choice of type {choice.type!r} must have it", f"{where}.name")
    if types.get(choice.name, choice.type) != choice.type:
        raise InvalidRequestError(
            f"{where}.type: {choice.name!r} is a {types[choice.name]} tool, not a {choice.type} one", f"{where}.type"
        )
    return ChosenFunction(name=choice.name)
