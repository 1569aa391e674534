"""XML between `<tool_call>` and `</tool_call>`, an element for each parameter, strings without quotes.

Qwen3-Coder and later; with other markers, and no line breaks around values, Seed-OSS.
"""

from __future__ import annotations

import re
from typing import Literal

from aengine.text.answer.formats.base import (
    BLANKS,
    CallableTool,
    CallFormat,
    CallReader,
    CallSyntax,
    Schema,
    Tools,
    object_schema,
)
from aengine.text.answer.formats.tagged_call import TaggedCall
from aengine.text.answer.formats.values.raw_rules import raw_value_rules
from aengine.text.answer.formats.values.schemas import (
    check_parameters,
    parameters_of,
    undeclared_schema,
    unwritable_name,
)
from aengine.text.answer.lark import Tokens, literal, sequence

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_WORD_END = re.compile("[>\n]")


class Qwen3Coder(CallFormat):
    """Calls as XML elements. begin, end: the markers of a call. line_break: the text around a value."""

    def __init__(self, begin: str = "<tool_call>", end: str = "</tool_call>", line_break: str = "\n") -> None:
        self.syntax = CallSyntax(
            begin=begin, unmarked=_FUNCTION, opening=r'"\n"', closing=f"\n{end}", end=end, between="\n"
        )
        self._break = line_break

    def detect(self, template: str) -> bool:
        return self.syntax.begin in template and _FUNCTION in template and _PARAMETER in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return XmlCallReader(tools, (self.syntax.begin, self.syntax.end), trimmed=bool(self._break))

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        """Return rules of the declared parameters, in the schema's order; of any parameters if none are declared."""
        check_parameters(tool)
        schema = object_schema(tool)
        parts, rules = [], []
        for index, (name, value, required) in enumerate(parameters_of(schema)):
            parameter, where = f"{rule}_{index}", f"{tool.where}.properties.{name}"
            if set(name) & {">", "\n"}:
                raise unwritable_name(where)
            parts.append(parameter if required else f"{parameter}?")
            rules += self._parameter(parameter, literal(f"{_PARAMETER}{name}>{self._break}"), value, tool, where)
        if (further := undeclared_schema(schema)) is not None:
            parts.append(f"{rule}_further*")
            head = sequence(literal(_PARAMETER), "/[^<>\\n]+/", literal(f">{self._break}"))
            rules += self._parameter(f"{rule}_further", head, further, tool, f"{tool.where}.additionalProperties")
        head = literal(f"{_FUNCTION}{tool.name}>\n")
        return [f"{rule}: {sequence(head, *parts, literal(_FUNCTION_END))}", *rules]

    def _parameter(self, rule: str, head: str, schema: Schema, tool: CallableTool, where: str) -> list[str]:
        end = f"{self._break}{_PARAMETER_END}\n"
        values = raw_value_rules(f"{rule}_value", schema, _PARAMETER_END, end, tool, where)
        return [f"{rule}: {head} {rule}_value", *values]


class XmlCallReader(TaggedCall):
    """Parses `<function=name>`, any number of `<parameter=key>value</parameter>`, and `</function>`.

    The call has begun with its name. A value ends with `</parameter>`, or if that is missing, with the first tag of a
    parameter or around it. Other text between parameters ends the call.

    markers: the texts before and after a call.
    """

    __slots__ = ("_end_marker", "_state", "_tag", "_word")

    def __init__(self, tools: Tools, markers: tuple[str, str], *, trimmed: bool) -> None:
        outer = (_FUNCTION, _FUNCTION_END, *markers)
        super().__init__(tools, _PARAMETER_END, _PARAMETER, outer, trimmed=trimmed)
        self._end_marker = markers[1]
        self._state: Literal["function", "name", "parameters", "key"] = "function"
        self._tag = ""  # the beginning of a tag
        self._word: list[str] = []  # pieces of a name or a key

    def _read(self, text: str, at: int) -> int:
        if self._value is not None:
            return self._read_value(self._value, text, at)
        return self._read_word(text, at) if self._state in ("name", "key") else self._read_tag(text, at)

    def _read_tag(self, text: str, at: int) -> int:
        if not self._tag and text[at] in BLANKS:
            return at + 1
        tag = self._tag + text[at]
        known = (_FUNCTION,) if self._state == "function" else (_PARAMETER, _FUNCTION_END, self._end_marker)
        if not any(each.startswith(tag) for each in known):
            self._break(self._tag)
            return at
        self._tag = "" if tag in known else tag
        if tag == _FUNCTION:
            self._state = "name"
        elif tag == _PARAMETER:
            self._state = "key"
        elif tag in known:
            self.done = True
        return at + 1

    def _read_word(self, text: str, at: int) -> int:
        """Parse more of a name or a key."""
        found = _WORD_END.search(text, at)
        end = len(text) if found is None else found.start()
        self._word.append(text[at:end])
        if found is None:
            return end
        if found[0] == "\n":
            self.broken = True
            return end
        word = "".join(self._word).strip()
        self._word.clear()
        if self._state == "key":
            self._begin_value(word)
        elif word in self._tools:
            self._begin_call(word)
        else:
            self.broken = True
            return end
        self._state = "parameters"
        return end + 1
