"""The tools of one request, as readers and grammars take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from aengine.text.answer.formats.base import CallableTool, Tools


class CallRules(NamedTuple):
    """Which tools a model may call. forced: it must call one. narrowed: it sees others that it may not call."""

    tools: tuple[CallableTool, ...] = ()
    forced: bool = False
    parallel: bool = True
    narrowed: bool = False

    @property
    def strict(self) -> bool:
        """Whether the arguments of some tool are held to its schema in any case."""
        return any(tool.strict for tool in self.tools)

    @property
    def bind(self) -> bool:
        """Whether an answer is held to a grammar because of them."""
        return self.forced or self.narrowed or self.strict

    @property
    def schemas(self) -> Tools:
        """The tools' names, with the JSON schema of each one's arguments."""
        return {tool.name: tool.parameters for tool in self.tools}


def rules_of(tools: Iterable[Mapping[str, Any]]) -> CallRules:
    """The rules of tools as OpenAI's API writes them, any of which may be called. Others, which a chat template may
    know, are not read.
    """
    found: dict[str, CallableTool] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            continue
        parameters = function.get("parameters")
        schema = parameters if isinstance(parameters, Mapping) else None
        found[name] = CallableTool(name, schema, function.get("strict") is True, f"tools[{index}].function.parameters")
    return CallRules(tuple(found.values()))
