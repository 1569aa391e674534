"""A name and elements between `<tool_call>` and `</tool_call>`, two for each argument: GLM 4.5 to 4.7."""

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
from aengine.text.answer.marker_search import MarkerSearch

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_TAGS = (_KEY, _KEY_END, _CALL, _CALL_END)  # all tags except those of a value
_NAME_END = re.compile("[<\n]")
_BREAK = r"/\n?/"  # between the parts: 4.5 and 4.6 write a line break, 4.7 does not


class Glm(CallFormat):
    syntax = CallSyntax(begin=_CALL, after_name=_KEY, closing=_CALL_END, end=_CALL_END, between="\n")

    def detect(self, template: str) -> bool:
        return _CALL in template and _KEY in template and _VALUE in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return KeysAndValuesReader(tools)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        """Return rules of the declared parameters, in the schema's order; of any parameters if none are declared."""
        check_parameters(tool)
        schema = object_schema(tool)
        parts, rules = [], []
        for index, (name, value, required) in enumerate(parameters_of(schema)):
            parameter, where = f"{rule}_{index}", f"{tool.where}.properties.{name}"
            if _KEY_END in name or name != name.strip():
                raise unwritable_name(where)
            parts.append(parameter if required else f"{parameter}?")
            rules += _parameter_rules(parameter, literal(f"{_KEY}{name}{_KEY_END}"), value, tool, where)
        if (further := undeclared_schema(schema)) is not None:
            parts.append(f"{rule}_further*")
            head = sequence(literal(_KEY), "/[^<>\\s]+/", literal(_KEY_END))
            rules += _parameter_rules(f"{rule}_further", head, further, tool, f"{tool.where}.additionalProperties")
        return [f"{rule}: {sequence(literal(tool.name), _BREAK, *parts)}", *rules]


def _parameter_rules(rule: str, head: str, schema: Schema, tool: CallableTool, where: str) -> list[str]:
    values = raw_value_rules(f"{rule}_value", schema, _VALUE_END, _VALUE_END, tool, where)
    return [f"{rule}: {head} {_BREAK} {literal(_VALUE)} {rule}_value {_BREAK}", *values]


class KeysAndValuesReader(TaggedCall):
    """Parses a name and any number of `<arg_key>key</arg_key><arg_value>value</arg_value>`.

    The call has begun with its name. A value ends with `</arg_value>`, or with the first tag if that is missing. Other
    text between elements ends the call.
    """

    __slots__ = ("_search", "_state", "_tag", "_word")

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools, _VALUE_END, _VALUE, _TAGS, trimmed=False)
        self._state: Literal["name", "key or end", "key", "value tag"] = "name"
        self._tag = ""  # the beginning of a tag
        self._word: list[str] = []  # pieces of a name or a key
        self._search = MarkerSearch()  # finds the end of a key

    def _read(self, text: str, at: int) -> int:
        if self._value is not None:
            return self._read_value(self._value, text, at)
        match self._state:
            case "name":
                return self._read_name(text, at)
            case "key":
                return self._read_key(text, at)
        return self._read_tag(text, at)

    def _read_name(self, text: str, at: int) -> int:
        begun = any(piece.strip() for piece in self._word)
        if not begun and text[at] in BLANKS:
            return at + 1
        found = _NAME_END.search(text, at)
        end = len(text) if found is None else found.start()
        self._word.append(text[at:end])
        if found is None:
            return end
        name = "".join(self._word).strip()
        self._word.clear()
        if name not in self._tools:
            self.broken = True
            return end
        self._state = "key or end"
        self._begin_call(name)
        return end

    def _read_tag(self, text: str, at: int) -> int:
        if not self._tag and text[at] in BLANKS:
            return at + 1
        tag = self._tag + text[at]
        known = (_VALUE,) if self._state == "value tag" else (_KEY, _CALL_END)
        if not any(each.startswith(tag) for each in known):
            self._break(self._tag)
            return at
        self._tag = "" if tag in known else tag
        if tag == _KEY:
            self._state, self._search = "key", MarkerSearch(_KEY_END, _VALUE, _CALL_END)
        elif tag == _VALUE:
            self._end_key()
        elif tag == _CALL_END:
            self.done = True
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        before, rest = self._search.feed(text[at:])
        self._word.append(before)
        if rest is None:
            return len(text)
        if self._search.found == _VALUE:  # the key is not closed
            self._end_key()
        elif self._search.found == _CALL_END:
            self.done = True
        else:
            self._state = "value tag"
        return len(text) - len(rest)

    def _end_key(self) -> None:
        key = "".join(self._word).strip()
        self._word.clear()
        self._state = "key or end"
        self._begin_value(key)
