"""Tools and a parser for calls of every format, and calls with a string that no quote closes."""

from __future__ import annotations

from typing import Any

from aengine.config import CallFormatName
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.formats.table import FORMATS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "sure": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": ["string", "boolean"]}},
        "object": {"type": "object", "additionalProperties": {"type": "integer"}},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "unit": {"enum": ["c", "f", None]},
        "reference": {"$ref": "#/$defs/point"},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}},
}
TOOLS = {"f": SCHEMA, "g-2": None}


def parser(form: CallFormatName, **options: bool) -> ToolCallParser:
    return ToolCallParser(FORMATS[form], TOOLS, **options)


_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
UNCLOSED_STRINGS: list[tuple[CallFormatName, str]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"text": "Oslo}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "Oslo</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"text\\": \\"Oslo\\"}}</tool_call>'),
    ("phi4", '<|tool_call|>[{"name": "f", "arguments": {"text": "Oslo}}]<|/tool_call|>'),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"text": "Oslo}}]'),
    ("llama3", '{"name": "f", "parameters": {"text": "Oslo}}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"text": "Oslo}'),
    ("mistral_list", '[TOOL_CALLS][{"name": "f", "arguments": {"text": "Oslo}}]'),
    (
        "deepseek",
        f'<｜tool▁calls▁begin｜>{_CALL}function<｜tool▁sep｜>f\n```json\n{{"text": "Oslo}}\n```{_CALL_END}'
        "<｜tool▁calls▁end｜>",
    ),
    ("deepseek_v31", f'<｜tool▁calls▁begin｜>{_CALL}f<｜tool▁sep｜>{{"text": "Oslo}}{_CALL_END}<｜tool▁calls▁end｜>'),
    (
        "kimi",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"text": "Oslo}'
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    ("pythonic", '[f(text="Oslo)]'),
    ("olmo", '<function_calls>f(text="Oslo)</function_calls>'),
    ("lfm2", '<|tool_call_start|>[f(text="Oslo)]<|tool_call_end|>'),
    ("cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"text": "Oslo}}]<|END_ACTION|>'),
    ("command_r", 'Action: ```json\n[{"tool_name": "f", "parameters": {"text": "Oslo}}]```'),
    ("internlm", '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"text": "Oslo}}<|action_end|>'),
    ("glm4", 'f\n{"text": "Oslo}'),
    ("apertus", '<|tools_prefix|>[{"f": {"text": "Oslo}}]<|tools_suffix|>'),
    ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {"text": "Oslo}}]</TOOLCALL>'),
]
