"""A name and elements between `<tool_call>` and `</tool_call>`, two for each argument: GLM 4.5 to 4.7."""

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
from aengine.text.answer.marker_search import MarkerSearch

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_TAGS = (_KEY, _KEY_END, _CALL, _CALL_END)  # beside those of a value
_BLANKS = " \t\r\n"
_NAME_END = re.compile("[<\n]")
_BREAK = r"/\n?/"  # between the parts: 4.5 and 4.6 write one, 4.7 does not


class Glm:
    syntax = CallSyntax(begin=_CALL, after_name=_KEY, closing=_CALL_END, end=_CALL_END, between="\n")

    def detect(self, template: str) -> bool:
        return _CALL in template and _KEY in template and _VALUE in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return KeysAndValuesReader(tools)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        """Grammar rules of the declared parameters, in the schema's order, or of any where none are declared."""
        check_parameters(tool)
        schema = object_schema(tool)
        parts, rules = [], []
        for index, (name, value, required) in enumerate(parameters_of(schema)):
            parameter, where = f"{rule}_{index}", f"{tool.where}.properties.{name}"
            if _KEY_END in name or name != name.strip():
                raise InvalidRequestError(f"{where}: the name cannot be written in this model's format of calls", where)
            parts.append(parameter if required else f"{parameter}?")
            rules += _parameter_rules(parameter, literal(f"{_KEY}{name}{_KEY_END}"), value, tool, where)
        if (further := further_of(schema)) is not None:
            parts.append(f"{rule}_further*")
            head = sequence(literal(_KEY), "/[^<>\\s]+/", literal(_KEY_END))
            rules += _parameter_rules(f"{rule}_further", head, further, tool, f"{tool.where}.additionalProperties")
        return [f"{rule}: {sequence(literal(tool.name), _BREAK, *parts)}", *rules]

    def new_id(self) -> str:
        return call_id()


def _parameter_rules(rule: str, head: str, schema: Schema, tool: CallableTool, where: str) -> list[str]:
    values = raw_value_rules(f"{rule}_value", schema, _VALUE_END, _VALUE_END, tool, where)
    return [f"{rule}: {head} {_BREAK} {literal(_VALUE)} {rule}_value {_BREAK}", *values]


class KeysAndValuesReader(PartialCall):
    """Parses a name and any number of `<arg_key>key</arg_key><arg_value>value</arg_value>`.

    The call has begun with its name. A value ends with `</arg_value>`, or if there is none with the first tag. What
    belongs between elements to no call ends it.
    """

    __slots__ = ("_end", "_keys", "_kinds", "_search", "_settled", "_state", "_tag", "_tools", "_value", "_word")

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._kinds: dict[str, frozenset[Kind]] = {}  # of the declared parameters
        self._state: Literal["name", "key or end", "key", "value tag", "value"] = "name"
        self._tag = ""  # the beginning of a tag
        self._word: list[str] = []  # of a name or a key, what has come
        self._keys = 0
        self._search = MarkerSearch()  # of a key's end
        self._settled = False
        self._value: RawText | None = None  # that is being read
        self._end = self._new_end()  # of it

    @property
    def begun(self) -> bool:
        return self.name is not None

    def _read(self, text: str, at: int) -> int:
        match self._state:
            case "name":
                return self._read_name(text, at)
            case "key":
                return self._read_key(text, at)
            case "value":
                return self._read_value(text, at)
        return self._read_tag(text, at)

    def _read_name(self, text: str, at: int) -> int:
        begun = any(piece.strip() for piece in self._word)
        if not begun and text[at] in _BLANKS:
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
        self.name, self._state = name, "key or end"
        self._arguments.append("{")
        declared = parameters_of(self._tools[name])
        self._kinds = {key: kinds_of(alternatives(schema)) for key, schema, _ in declared}
        return end

    def _read_tag(self, text: str, at: int) -> int:
        if not self._tag and text[at] in _BLANKS:
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
            self._begin_value()
        elif tag == _CALL_END:
            self.done = True
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        before, rest = self._search.feed(text[at:])
        self._word.append(before)
        if rest is None:
            return len(text)
        if self._search.found == _VALUE:  # the key is not closed
            self._begin_value()
        elif self._search.found == _CALL_END:
            self.done = True
        else:
            self._state = "value tag"
        return len(text) - len(rest)

    def _begin_value(self) -> None:
        key = "".join(self._word).strip()
        self._word.clear()
        self._state, self._end = "value", self._new_end()
        self._value = RawText(self._kinds.get(key, EVERYTHING), trimmed=False)
        self._arguments.append(f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys += 1

    def _new_end(self) -> ValueEnd:
        return ValueEnd(_VALUE_END, _VALUE, _TAGS, self._settled)

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
        self._value, self._state = None, "key or end"

    def settle(self) -> str:
        self._settled = True
        return self._end.settle() if self._state == "value" else ""

    def _close(self) -> None:
        if self._value is not None:
            self._arguments.append(self._value.feed(self._end.flush()))
            self._end_value()
        self._arguments.append("}")
