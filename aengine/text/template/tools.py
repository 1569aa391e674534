"""Tools as a template takes them: some templates fail if a tool leaves out what OpenAI's API lets it leave out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aengine.text.template.messages import function_of


class ToolsLayout(NamedTuple):
    """What a template needs of tools. Missing texts become empty, and a missing schema one without parameters.

    descriptions: of tools, or of tools and their parameters. schema: `parameters` with `properties`.
    text_defaults: the defaults of parameters with choices are texts.
    """

    descriptions: Literal["", "tools", "parameters"] = ""
    schema: bool = False
    text_defaults: bool = False


def _tool(**fields: object) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": "probe", **fields}}]


def _with_parameter(**schema: object) -> dict[str, object]:
    return {"type": "object", "properties": {"a": {"type": "integer", **schema}}}


PROBE_TOOLS = _tool(parameters=_with_parameter())
# Tools that a template may refuse, and the changes that may help.
TOOL_PROBES: Sequence[tuple[list[dict[str, object]], Iterable[dict[str, Any]]]] = (
    (PROBE_TOOLS, ({"descriptions": "tools"}, {"descriptions": "parameters"})),
    (_tool(description="d"), ({"schema": True},)),
    (_tool(description="d", parameters={}), ({"schema": True},)),
    (
        _tool(description="d", parameters=_with_parameter(description="d", enum=[1], default=1)),
        ({"text_defaults": True},),
    ),
)


def laid_out(tools: Sequence[object], layout: ToolsLayout) -> list[object]:
    """Return the tools with what the template needs. All else stays."""
    return list(tools) if layout == ToolsLayout() else [_laid_out(tool, layout) for tool in tools]


def _laid_out(tool: object, layout: ToolsLayout) -> object:
    function = function_of(tool)
    if not isinstance(tool, dict) or function is None:
        return tool
    if layout.descriptions:
        function = _with_description(function)
    schema = function.get("parameters")
    if layout.schema and (schema is None or (isinstance(schema, dict) and "properties" not in schema)):
        schema = {"type": "object", "properties": {}, **(schema or {})}
        function = {**function, "parameters": schema}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and isinstance(properties, dict):
        each = {name: _parameter(one, layout) if isinstance(one, dict) else one for name, one in properties.items()}
        function = {**function, "parameters": {**schema, "properties": each}}
    return {**tool, "function": function}


def _parameter(schema: dict[str, Any], layout: ToolsLayout) -> dict[str, Any]:
    if layout.descriptions == "parameters":
        schema = _with_description(schema)
    default, has_choices = schema.get("default"), "enum" in schema or "oneOf" in schema
    if layout.text_defaults and has_choices and "default" in schema and not isinstance(default, str):
        schema = {**schema, "default": json.dumps(default, ensure_ascii=False)}
    return schema


def _with_description(data: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, "description": data.get("description") or ""}
