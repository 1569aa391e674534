"""Reads `tools` and `tool_choice` in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence

from aengine.errors import InvalidRequestError
from aengine.http.anthropic.bodies import CountTokensRequest, InputTool, InputToolChoice
from aengine.http.fields.messages import Function, Tool
from aengine.http.fields.tools import ToolUse

_AUTO = InputToolChoice(type="auto")


def tool_use_of(body: CountTokensRequest) -> ToolUse:
    """Return the tools of a request and how they may be called. Raises `InvalidRequestError`, naming the field.

    With `tool_choice` `none` the model does not see the tools, so it cannot call them.
    """
    choice = body.tool_choice or _AUTO
    offered = _offered(body.tools or [])
    chosen = offered
    if choice.type == "none":
        offered = chosen = []
    elif choice.type != "auto" and not offered:
        raise InvalidRequestError("tool_choice: there are no tools to choose from", "tool_choice")
    elif choice.type == "tool":
        chosen = [tool for tool in offered if tool.function.name == choice.name]
        if not chosen:
            named = "must be given" if choice.name is None else f"{choice.name[:128]!r} is not among the tools"
            raise InvalidRequestError(f"tool_choice.name: {named}", "tool_choice.name")
    return ToolUse(
        offered,
        chosen,
        forced=choice.type in ("any", "tool"),
        parallel=not choice.disable_parallel_tool_use,
        place="tools[{}]".format,
        schema="input_schema",
    )


def _offered(tools: Sequence[InputTool]) -> list[Tool]:
    names: set[str] = set()
    offered = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise InvalidRequestError(
                f"{path}.type: {tool.type[:64]!r} is a tool of Anthropic's, which this server does not have: offer one "
                "of your own, with input_schema",
                f"{path}.type",
            )
        if tool.name is None or tool.input_schema is None:
            missing = f"{path}.{'name' if tool.name is None else 'input_schema'}"
            raise InvalidRequestError(f"{missing}: must be given", missing)
        if tool.name in names:
            raise InvalidRequestError(f"{path}.name: there is another tool of the name {tool.name!r}", f"{path}.name")
        names.add(tool.name)
        kind = tool.input_schema.get("type", "object")
        if kind != "object":
            raise InvalidRequestError(
                f'{path}.input_schema: the schema must be of "type": "object", got {str(kind)[:64]!r}',
                f"{path}.input_schema.type",
            )
        function = Function(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        offered.append(Tool(type="function", function=function))
    return offered
