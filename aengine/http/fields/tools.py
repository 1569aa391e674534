"""Reads `tools` and `tool_choice`: the offered tools, the callable ones, and whether a call is forced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from aengine.errors import InvalidRequestError
from aengine.http.fields.messages import AllowedToolsChoice, ChosenTool, Tool, ToolChoice
from aengine.text.answer.formats.base import CallableTool
from aengine.text.reading import CallRules


class ToolUse(NamedTuple):
    """The tools of a request.

    callable_tools: the offered tools that may be called.
    place: returns the path in the request of the tool with this index, for errors.
    """

    offered: list[Tool]
    callable_tools: list[Tool]
    forced: bool
    parallel: bool
    place: Callable[[int], str]
    schema: str = "parameters"  # the name of the field with a function's schema

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.callable_tools)

    @property
    def rules(self) -> CallRules:
        """The rules for readers and grammars of answers."""
        tools: list[CallableTool] = []
        called = set(map(id, self.callable_tools))
        for index, tool in enumerate(self.offered):
            if id(tool) in called:
                function, place = tool.function, f"{self.place(index)}.{self.schema}"
                tools.append(CallableTool(function.name, function.parameters, bool(function.strict), place))
        narrowed = len(self.callable_tools) < len(self.offered)
        return CallRules(tuple(tools), self.forced, self.parallel, narrowed)


def _in_chats(index: int) -> str:
    return f"tools[{index}].function"


NO_TOOLS = ToolUse([], [], False, True, _in_chats)


def choose_tools(
    tools: list[Tool],
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    *,
    parallel: bool,
    place: Callable[[int], str] = _in_chats,
    chosen: str = "tool_choice.function",
    allowed: str = "tool_choice.allowed_tools.tools[{}].function",
) -> ToolUse:
    """Return which tools may be called, and whether a call is forced.

    place: returns the path in the request of an offered tool by its index, for errors.
    chosen: the path of the chosen tool.
    allowed: the paths of allowed tools, as a format of their index.

    With `tool_choice: "none"` the model does not see the tools, so it cannot call them. Raises `InvalidRequestError`,
    naming the field.
    """
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = place(index)
        if tool.function.name in names:
            path = f"{where}.name"
            raise InvalidRequestError(f"{path}: there is another tool of the name {tool.function.name!r}", path)
        names.add(tool.function.name)
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            path = f"{where}.parameters"
            raise InvalidRequestError(f'{path}: the schema must be of "type": "object", got {kind!r}', f"{path}.type")
    if choice is None or choice == "auto":
        return ToolUse(tools, tools, False, parallel, place)
    if choice == "none":
        return ToolUse([], [], False, parallel, place)
    if not tools:
        raise InvalidRequestError("tool_choice: there are no tools to choose from", "tool_choice")
    if isinstance(choice, ChosenTool):
        return ToolUse(tools, _chosen(tools, [choice], chosen), True, False, place)
    if isinstance(choice, AllowedToolsChoice):
        among = _chosen(tools, choice.allowed_tools.tools, allowed)
        return ToolUse(tools, among, choice.allowed_tools.mode == "required", parallel, place)
    return ToolUse(tools, tools, True, parallel, place)


def _chosen(tools: Sequence[Tool], named: Sequence[ChosenTool], where: str) -> list[Tool]:
    """Return the tools with these names. where: the paths of the names in the request, as a format of their index."""
    known = {tool.function.name for tool in tools}
    for index, each in enumerate(named):
        if each.function.name not in known:
            path = f"{where.format(index)}.name"
            raise InvalidRequestError(f"{path}: {each.function.name!r} is not among the tools", path)
    names = {each.function.name for each in named}
    return [tool for tool in tools if tool.function.name in names]
