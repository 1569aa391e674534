"""XML between `<tool_call>` and `</tool_call>`, an element for each parameter, strings without quotes.

Qwen3-Coder and later. With other markers, and no line breaks around values, Seed-OSS and MiniMax M2.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

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


class Tags(NamedTuple):
    """The tags of a call and of a value. A name stands between `function` or `parameter` and `named`."""

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    named: str


_EQUALS = Tags("<function=", "</function>", "<parameter=", "</parameter>", ">")
MINIMAX = Tags('<invoke name="', "</invoke>", '<parameter name="', "</parameter>", '">')
_WORD_END = re.compile("[>\n]")


class Qwen3Coder(CallFormat):
    """Calls as XML elements.

    begin, end: the markers of a call, or of all calls if they are `grouped`. line_break: the text around a value.
    """

    def __init__(
        self,
        begin: str = "<tool_call>",
        end: str = "</tool_call>",
        line_break: str = "\n",
        tags: Tags = _EQUALS,
        *,
        grouped: bool = False,
    ) -> None:
        self.syntax = CallSyntax(
            begin=begin,
            unmarked=tags.function,
            opening=r'"\n"',
            separator="\n" if grouped else None,
            closing=f"\n{end}",
            end=end,
            further="<" if grouped else "",
            between=None if grouped else "\n",
        )
        self._break = line_break
        self._tags = tags

    def detect(self, template: str) -> bool:
        tags = self._tags
        return self.syntax.begin in template and tags.function in template and tags.parameter in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return XmlCallReader(tools, self._tags, (self.syntax.begin, self.syntax.end), trimmed=bool(self._break))

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        """Return rules of the declared parameters, in the schema's order; of any parameters if none are declared."""
        check_parameters(tool)
        schema, tags = object_schema(tool), self._tags
        parts, rules = [], []
        for index, (name, value, required) in enumerate(parameters_of(schema)):
            parameter, where = f"{rule}_{index}", f"{tool.where}.properties.{name}"
            if set(name) & {*tags.named, "\n"}:
                raise unwritable_name(where)
            parts.append(parameter if required else f"{parameter}?")
            rules += self._parameter(
                parameter, literal(f"{tags.parameter}{name}{tags.named}{self._break}"), value, tool, where
            )
        if (further := undeclared_schema(schema)) is not None:
            parts.append(f"{rule}_further*")
            head = sequence(literal(tags.parameter), f"/[^<{tags.named}\\n]+/", literal(f"{tags.named}{self._break}"))
            rules += self._parameter(f"{rule}_further", head, further, tool, f"{tool.where}.additionalProperties")
        head = literal(f"{tags.function}{tool.name}{tags.named}\n")
        return [f"{rule}: {sequence(head, *parts, literal(tags.function_end))}", *rules]

    def _parameter(self, rule: str, head: str, schema: Schema, tool: CallableTool, where: str) -> list[str]:
        end = f"{self._break}{self._tags.parameter_end}\n"
        values = raw_value_rules(f"{rule}_value", schema, self._tags.parameter_end, end, tool, where)
        return [f"{rule}: {head} {rule}_value", *values]


class XmlCallReader(TaggedCall):
    """Parses `<function=name>`, any number of `<parameter=key>value</parameter>`, and `</function>`.

    The call has begun with its name. A value ends with `</parameter>`, or if that is missing, with the first tag of a
    parameter or around it. Other text between parameters ends the call. Names may be in quotes, and a line break may
    end a key.

    markers: the texts before and after a call.
    """

    __slots__ = ("_end_marker", "_names", "_state", "_tag", "_word")

    def __init__(self, tools: Tools, tags: Tags, markers: tuple[str, str], *, trimmed: bool) -> None:
        outer = (tags.function, tags.function_end, *markers)
        super().__init__(tools, tags.parameter_end, tags.parameter, outer, trimmed=trimmed)
        self._names = tags
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
        tags = self._names
        within = tags.parameter, tags.function_end, self._end_marker
        known = (tags.function,) if self._state == "function" else within
        if not any(each.startswith(tag) for each in known):
            self._break(self._tag)
            return at
        self._tag = "" if tag in known else tag
        if tag == tags.function:
            self._state = "name"
        elif tag == tags.parameter:
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
        word = "".join(self._word).strip().removesuffix(self._names.named[:-1])
        # A key whose tag lacks its end is one nevertheless: the call has begun, and would lose an argument.
        if found[0] == "\n" and (self._state == "name" or not word):
            self.broken = True
            return end
        self._word.clear()
        known = self._kinds if self._state == "key" else self._tools
        word = word if word in known else word.strip("\"'")
        if self._state == "key":
            self._begin_value(word)
        elif word in self._tools:
            self._begin_call(word)
        else:
            self.broken = True
            return end
        self._state = "parameters"
        return end + 1
