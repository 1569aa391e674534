"""Reads `tools` and `tool_choice`: the tools that a request offers, which may be called, and whether one must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aengine.errors import InvalidRequestError
from aengine.http.bodies.chat import AllowedToolsChoice, ChosenTool, Tool
from aengine.http.bodies.requests import ChatRequest


class ToolUse(NamedTuple):
    """The tools of a request. `callable_tools` are all that are offered, or those that were chosen."""

    offered: list[Tool]
    callable_tools: list[Tool]
    forced: bool
    parallel: bool
    schema_path: str = "tools[{}].function.parameters"  # of a tool's schema in the request, for errors

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.callable_tools)

    @property
    def schemas(self) -> dict[str, dict[str, Any] | None]:
        """The callable tools' names, with the JSON schema of each one's arguments."""
        return {tool.function.name: tool.function.parameters for tool in self.callable_tools}


NO_TOOLS = ToolUse([], [], forced=False, parallel=True)


def tool_use(body: ChatRequest) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises `InvalidRequestError`, naming the field.

    With `tool_choice: "none"` the model does not hear of the tools, so that it cannot call them.
    """
    tools, choice = body.tools or [], body.tool_choice
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            path = f"tools[{index}].function.name"
            raise InvalidRequestError(f"{path}: there is another tool of the name {tool.function.name!r}", path)
        names.add(tool.function.name)
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            path = f"tools[{index}].function.parameters"
            raise InvalidRequestError(f'{path}: the schema must be of "type": "object", got {kind!r}', f"{path}.type")
    parallel = body.parallel_tool_calls is not False
    if choice is None or choice == "auto":
        return ToolUse(tools, tools, forced=False, parallel=parallel)
    if choice == "none":
        return ToolUse([], [], forced=False, parallel=parallel)
    if not tools:
        raise InvalidRequestError("tool_choice: there are no tools to choose from", "tool_choice")
    if isinstance(choice, ChosenTool):
        return ToolUse(tools, _chosen(tools, [choice], "tool_choice"), forced=True, parallel=False)
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        chosen = _chosen(tools, allowed.tools, "tool_choice.allowed_tools.tools[{}]")
        return ToolUse(tools, chosen, forced=allowed.mode == "required", parallel=parallel)
    return ToolUse(tools, tools, forced=True, parallel=parallel)


def _chosen(tools: Sequence[Tool], named: Sequence[ChosenTool], where: str) -> list[Tool]:
    """The tools with these names; `where` is the place of each one's name, a gap for its number in it."""
    known = {tool.function.name for tool in tools}
    for index, each in enumerate(named):
        if each.function.name not in known:
            path = f"{where.format(index)}.function.name"
            raise InvalidRequestError(f"{path}: {each.function.name!r} is not among the tools", path)
    names = {each.function.name for each in named}
    return [tool for tool in tools if tool.function.name in names]
