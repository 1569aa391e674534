"""Calls as Python writes them.

A list that is the whole answer, `[get_weather(city="Paris"), now()]`: Llama 3.2 and 4, ToolACE. Calls on lines of their
own between `<function_calls>` and `</function_calls>`: OLMo 3. A list between markers: LFM2.
"""

from __future__ import annotations

import json
import re
import string
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
from aengine.text.answer.formats.partial_call import PartialCall
from aengine.text.answer.formats.values.python_literal import LiteralReader
from aengine.text.answer.formats.values.schemas import (
    ANNOTATIONS,
    alternatives,
    check_parameters,
    parameters_of,
    undeclared_schema,
    unwritable_name,
)
from aengine.text.answer.lark import Tokens, json_value, literal, separated, sequence

_WORD = re.compile(r"[\w.-]*")
_PYTHON = {True: "True", False: "False", None: "None"}


class Pythonic(CallFormat):
    syntax = CallSyntax(
        bare="[",
        before_name="[",
        opening='"["',
        separator=", ",
        closing="]",
        end="]",
        further=string.ascii_letters + "_",
        noise=" \t\r\n,",
    )

    def detect(self, template: str) -> bool:
        return re.search(r"\[\s*func_name1?\(", template) is not None

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return PythonCallReader(tools, (")]",), "[" if first else "")

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        """Return rules of the declared parameters, in the schema's order; of any parameters if none are declared."""
        check_parameters(tool)
        schema = object_schema(tool)
        parameters = parameters_of(schema)
        members, end, comma = f"{rule}_members", '""', literal(", ")
        rules = [f"{rule}: {sequence(literal(f'{tool.name}('), members, literal(')'))}"]
        for index, (name, value, _) in enumerate(parameters):
            one, where = f"{members}_{index}", f"{tool.where}.properties.{name}"
            if _WORD.fullmatch(name) is None:
                raise unwritable_name(where)
            rules += [
                f"{one}: {literal(f'{name}=')} {one}_value",
                *_value_rules(f"{one}_value", value, tool, where),
            ]
        if (further := undeclared_schema(schema)) is not None:
            end = f"({rule}_any ({comma} {rule}_any)*)?"
            rules += [
                f"{rule}_any: /[A-Za-z_][A-Za-z0-9_]*/ {literal('=')} {rule}_any_value",
                *_value_rules(f"{rule}_any_value", further, tool, f"{tool.where}.additionalProperties"),
            ]
        return rules + separated(members, [parameter.required for parameter in parameters], comma, end)


class PythonicLines(Pythonic):
    syntax = CallSyntax(
        begin="<function_calls>",
        separator="\n",
        closing="</function_calls>",
        end="</function_calls>",
        further=string.ascii_letters + "_",
        noise=" \t\r\n,",
    )

    def detect(self, template: str) -> bool:
        return "<function_calls>" in template and "</function_calls>" in template and "<invoke" not in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return PythonCallReader(tools, self.syntax.markers)


class PythonicList(Pythonic):
    syntax = CallSyntax(
        begin="<|tool_call_start|>",
        opening='"["',
        separator=", ",
        closing="]<|tool_call_end|>",
        end="<|tool_call_end|>",
        further=string.ascii_letters + "_",
        noise=" \t\r\n,]",
    )

    def detect(self, template: str) -> bool:
        return "<|tool_list_start|>" in template or self.syntax.begin in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return PythonCallReader(tools, (")]", *self.syntax.markers), "[" if first else "")


def _value_rules(rule: str, schema: Schema, tool: CallableTool, where: str) -> list[str]:
    """Return rules of values: True, False and None in Python's notation, the content of lists and dicts in JSON's.

    The reader understands both notations.
    """
    options: list[str] = []
    rules: list[str] = []
    found = alternatives(schema)
    for index, each in enumerate(found if {} not in found else [schema]):
        if each.get("type") in ("boolean", "null"):
            words = (None,) if each["type"] == "null" else (True, False)
            options += [literal(_PYTHON[word]) for word in words if word in each.get("enum", words)]
            continue
        if each.keys() <= ANNOTATIONS:  # anything
            options += [literal(word) for word in _PYTHON.values()]
        options.append(f"{rule}_{index}")
        rules.append(f"{rule}_{index}: {json_value(each, where, lenient=not tool.strict)}")
    return [f"{rule}: {' | '.join(options)}", *rules]


class PythonCallReader(PartialCall):
    """Parses `name(key=value, ...)`, after `opening`. The call has begun with the first `=` or its end.

    tags: the texts that end a string whose closing quote is missing.
    """

    __slots__ = ("_expects", "_keys", "_opening", "_tags", "_tools", "_value", "_word")

    def __init__(self, tools: Tools, tags: tuple[str, ...], opening: str = "") -> None:
        super().__init__()
        self._tools = tools
        self._tags = tags
        self._opening = opening
        self._expects: Literal["opening", "name", "key", "value", "comma"] = "opening" if opening else "name"
        self._word: list[str] = []  # pieces of a name or key
        self._keys = 0
        self._value = LiteralReader()

    @property
    def begun(self) -> bool:
        return self.done or self._keys > 0

    def _read(self, text: str, at: int) -> int:
        if self._expects == "value":
            return self._read_value(text, at)
        if self._expects in ("name", "key") and (end := _end_of_word(text, at)) > at:
            self._word.append(text[at:end])
            return end
        if text[at] in BLANKS or self._take(text[at]):
            return at + 1
        self.broken = True
        return at

    def _close(self) -> None:
        if not self.done:
            self._value.close()
            self._arguments += [self._value.take(), "}"]

    def _take(self, character: str) -> bool:
        """Parse a character between words and values. Returns False if it does not belong here."""
        word = "".join(self._word)
        match self._expects:
            case "opening" if character == self._opening:
                self._expects = "name"
            case "name" if character == "(" and word in self._tools:
                self.name, self._expects = word, "key"
            case "key" if character == "=" and word:
                self._expects, self._value = "value", LiteralReader(self._tags)
                self._arguments.append(f"{', ' if self._keys else '{'}{json.dumps(word, ensure_ascii=False)}: ")
                self._keys += 1
            case "key" | "comma" if character == ")" and not word:
                self._arguments.append("}" if self._keys else "{}")
                self.done = True
            case "comma" if character == ",":
                self._expects = "key"
            case _:
                return False
        self._word.clear()
        return True

    def _read_value(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        self._arguments.append(self._value.take())
        if self._value.done:
            self._expects = "comma"
        if self._value.broken:
            self.left = self._end_call(self._value.left)
        return end

    def settle(self) -> str:
        """See `CallReader`."""
        left = self._value.settle()
        return self._end_call(left) if left else ""

    def _end_call(self, rest: str) -> str:
        """End the call after a broken value. Returns the text that follows the call. rest: the text that follows the
        value.
        """
        if not rest.startswith(")"):
            self.broken = True
            return rest
        self._value.close()
        self._arguments.append(self._value.take())
        self._expects = "comma"
        self._take(")")
        return rest[1:]


def _end_of_word(text: str, at: int) -> int:
    found = _WORD.match(text, at)
    return at if found is None else found.end()
