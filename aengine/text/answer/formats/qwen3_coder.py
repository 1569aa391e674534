"""XML between `<tool_call>` and `</tool_call>`, an element a parameter, strings as they are: Qwen3-Coder and later, and
with other markers, and no line breaks around values, Seed-OSS.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from aengine.errors import InvalidRequestError
from aengine.text.answer.formats.base import CallableTool, CallReader, CallSyntax, Schema, Tools, call_id, object_schema
from aengine.text.answer.formats.partial_call import PartialCall
from aengine.text.answer.formats.values.raw_rules import raw_value_rules
from aengine.text.answer.formats.values.raw_text import RawText
from aengine.text.answer.formats.values.schemas import (
    EVERYTHING,
    Kind,
    alternatives,
    check_parameters,
    further_of,
    kinds_of,
    parameters_of,
)
from aengine.text.answer.formats.values.value_end import ValueEnd
from aengine.text.answer.lark import Tokens, literal, sequence

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_BLANKS = " \t\r\n"
_WORD_END = re.compile("[>\n]")


class Qwen3Coder:
    """`begin`, `end`: the markers of a call. `line_break`: what stands around a value."""

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
        """Grammar rules of the declared parameters, in the schema's order, or of any where none are declared."""
        check_parameters(tool)
        schema = object_schema(tool)
        parts, rules = [], []
        for index, (name, value, required) in enumerate(parameters_of(schema)):
            parameter, where = f"{rule}_{index}", f"{tool.where}.properties.{name}"
            if set(name) & {">", "\n"}:
                raise InvalidRequestError(f"{where}: the name cannot be written in this model's format of calls", where)
            parts.append(parameter if required else f"{parameter}?")
            rules += self._parameter(parameter, literal(f"{_PARAMETER}{name}>{self._break}"), value, tool, where)
        if (further := further_of(schema)) is not None:
            parts.append(f"{rule}_further*")
            head = sequence(literal(_PARAMETER), "/[^<>\\n]+/", literal(f">{self._break}"))
            rules += self._parameter(f"{rule}_further", head, further, tool, f"{tool.where}.additionalProperties")
        head = literal(f"{_FUNCTION}{tool.name}>\n")
        return [f"{rule}: {sequence(head, *parts, literal(_FUNCTION_END))}", *rules]

    def new_id(self) -> str:
        return call_id()

    def _parameter(self, rule: str, head: str, schema: Schema, tool: CallableTool, where: str) -> list[str]:
        end = f"{self._break}{_PARAMETER_END}\n"
        values = raw_value_rules(f"{rule}_value", schema, _PARAMETER_END, end, tool, where)
        return [f"{rule}: {head} {rule}_value", *values]


class XmlCallReader(PartialCall):
    """Parses `<function=name>`, any number of `<parameter=key>value</parameter>`, and `</function>`.

    The call has begun with its name. A value ends with `</parameter>`, or if there is none with the first tag of a
    parameter or of what is around it. What belongs between parameters to no call ends it.

    markers: what stands before and behind a call.
    """

    __slots__ = (
        "_end",
        "_keys",
        "_kinds",
        "_markers",
        "_settled",
        "_state",
        "_tag",
        "_tools",
        "_trimmed",
        "_value",
        "_word",
    )

    def __init__(self, tools: Tools, markers: tuple[str, str], *, trimmed: bool) -> None:
        super().__init__()
        self._markers = markers
        self._settled = False
        self._trimmed = trimmed
        self._tools = tools
        self._kinds: dict[str, frozenset[Kind]] = {}  # of the declared parameters
        self._state: Literal["function", "name", "parameters", "key", "value"] = "function"
        self._tag = ""  # the beginning of a tag
        self._word: list[str] = []  # of a name or a key, what has come
        self._keys = 0
        self._value: RawText | None = None  # that is being read
        self._end = self._new_end()  # of it

    @property
    def begun(self) -> bool:
        return self.name is not None

    def _read(self, text: str, at: int) -> int:
        if self._state in ("function", "parameters"):
            return self._read_tag(text, at)
        return self._read_value(text, at) if self._state == "value" else self._read_word(text, at)

    def _read_tag(self, text: str, at: int) -> int:
        if not self._tag and text[at] in _BLANKS:
            return at + 1
        tag = self._tag + text[at]
        known = (_FUNCTION,) if self._state == "function" else (_PARAMETER, _FUNCTION_END, self._markers[1])
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
            self.name, self._state = word, "parameters"
            self._arguments.append("{")
            declared = parameters_of(self._tools[word])
            self._kinds = {name: kinds_of(alternatives(schema)) for name, schema, _ in declared}
        else:
            self.broken = True
            return end
        return end + 1

    def _begin_value(self, key: str) -> None:
        self._state = "value"
        self._value = RawText(self._kinds.get(key, EVERYTHING), trimmed=self._trimmed)
        self._end = self._new_end()
        self._arguments.append(f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys += 1

    def _new_end(self) -> ValueEnd:
        outer = (_FUNCTION, _FUNCTION_END, *self._markers)
        return ValueEnd(_PARAMETER_END, _PARAMETER, outer, self._settled)

    def _read_value(self, text: str, at: int) -> int:
        before, rest = self._end.feed(text[at:])
        if self._value is not None:
            self._arguments.append(self._value.feed(before))
        if rest is None:
            return len(text)
        self._end_value()
        return len(text) - len(rest)

    def _end_value(self) -> None:
        if self._value is not None:
            self._arguments.append(self._value.finish())
        self._value, self._state = None, "parameters"

    def settle(self) -> str:
        self._settled = True
        return self._end.settle() if self._state == "value" else ""

    def _close(self) -> None:
        if self._value is not None:
            self._arguments.append(self._value.feed(self._end.flush()))
            self._end_value()
        self._arguments.append("}")
