"""Which tools a request offers to the model, which it may call, and whether it must."""

from __future__ import annotations

from typing import NamedTuple

from aengine.errors import InvalidRequestError
from aengine.http.chat_structs import Tool, ToolChoice
from aengine.http.structs import ChatRequest


class ToolUse(NamedTuple):
    """`callable_tools` are all that are offered, or the one that was chosen."""

    offered: list[Tool]
    callable_tools: list[Tool]
    forced: bool
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.callable_tools)


def tool_use(body: ChatRequest) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises `InvalidRequestError`, naming the field.

    With `tool_choice: "none"` the model does not hear of the tools, so that it cannot call them.
    """
    tools, choice = body.tools or [], body.tool_choice
    for index, tool in enumerate(tools):
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
    if not isinstance(choice, ToolChoice):
        return ToolUse(tools, tools, forced=True, parallel=parallel)
    chosen = [tool for tool in tools if tool.function.name == choice.function.name]
    if not chosen:
        raise InvalidRequestError(
            f"tool_choice.function.name: {choice.function.name!r} is not among the tools", "tool_choice.function.name"
        )
    return ToolUse(tools, chosen, forced=True, parallel=False)
