"""A name and elements between `<tool_call>` and `</tool_call>`, two for each argument: GLM 4.5 to 4.7, Hy3."""

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
from aengine.text.answer.lark import Tokens, literal, marker, sequence
from aengine.text.answer.marker_search import MarkerSearch

_NAME_END = re.compile("[<\n]")
_BREAK = r"/\n?/"  # between the parts: GLM 4.5 and 4.6 write a line break, 4.7 does not


class Tags(NamedTuple):
    """The tags of a call. around: the tags around all calls, if there are such tags."""

    call: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    after_name: str = ""
    around: tuple[str, ...] = ()

    @property
    def outer(self) -> tuple[str, ...]:
        """All tags except those of a value."""
        return (self.key, self.key_end, self.call, self.call_end, *self.around)


_GLM = Tags("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class Glm(CallFormat):
    tags = _GLM
    syntax = CallSyntax(begin=_GLM.call, after_name=_GLM.key, closing=_GLM.call_end, end=_GLM.call_end, between="\n")

    def detect(self, template: str) -> bool:
        return all(tag in template for tag in (_GLM.call, _GLM.key, _GLM.value))

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return KeysAndValuesReader(tools, self.tags)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        """Return rules of the declared parameters, in the schema's order; of any parameters if none are declared."""
        check_parameters(tool)
        schema, tags = object_schema(tool), self.tags
        parts, rules = [], []
        for index, (name, value, required) in enumerate(parameters_of(schema)):
            parameter, where = f"{rule}_{index}", f"{tool.where}.properties.{name}"
            if tags.key_end in name or name != name.strip():
                raise unwritable_name(where)
            parts.append(parameter if required else f"{parameter}?")
            rules += self._parameter(parameter, literal(f"{tags.key}{name}{tags.key_end}"), value, tool, where)
        if (further := undeclared_schema(schema)) is not None:
            parts.append(f"{rule}_further*")
            head = sequence(literal(tags.key), "/[^<>\\s]+/", literal(tags.key_end))
            rules += self._parameter(f"{rule}_further", head, further, tool, f"{tool.where}.additionalProperties")
        return [f"{rule}: {self._call(tool.name, parts, tokens)}", *rules]

    def _call(self, name: str, parts: list[str], tokens: Tokens) -> str:
        """Return an expression of a call with these parameters."""
        return sequence(literal(name), _BREAK, *parts)

    def _parameter(self, rule: str, head: str, schema: Schema, tool: CallableTool, where: str) -> list[str]:
        end = self.tags.value_end
        values = raw_value_rules(f"{rule}_value", schema, end, end, tool, where)
        return [f"{rule}: {head} {_BREAK} {literal(self.tags.value)} {rule}_value {_BREAK}", *values]


class Hy3(Glm):
    """Hy3's format: `<tool_calls>` around all calls, and `<tool_sep>` after a name.

    suffix: the end of each tag's name. The preview has none.
    """

    def __init__(self, suffix: str) -> None:
        def pair(name: str) -> tuple[str, str]:
            return f"<{name}{suffix}>", f"</{name}{suffix}>"

        begin, end = pair("tool_calls")
        call, separator = pair("tool_call"), f"<tool_sep{suffix}>"
        self.tags = Tags(*call, *pair("arg_key"), *pair("arg_value"), after_name=separator, around=(begin, end))
        self.syntax = CallSyntax(
            begin=begin,
            unmarked=self.tags.call,
            opening=r'"\n"',
            separator="\n",
            closing=f"\n{end}",
            end=end,
            further="<",
            inner=call,
        )
        self._suffix = suffix

    def detect(self, template: str) -> bool:
        # A template may put its tags together from a name and the suffix.
        return "<tool_sep" in template and self._suffix in template

    def _call(self, name: str, parts: list[str], tokens: Tokens) -> str:
        begin, end = marker(self.tags.call, tokens), marker(self.tags.call_end, tokens)
        return sequence(begin, literal(f"{name}{self.tags.after_name}"), _BREAK, *parts, end)


class KeysAndValuesReader(TaggedCall):
    """Parses a name and any number of `<arg_key>key</arg_key><arg_value>value</arg_value>`.

    The call has begun with its name. A value ends with `</arg_value>`, or with the first tag if that is missing. Other
    text between elements ends the call. If there are tags around all calls, a call's own tag comes first.
    """

    __slots__ = ("_names", "_search", "_state", "_tag", "_word")

    def __init__(self, tools: Tools, tags: Tags) -> None:
        super().__init__(tools, tags.value_end, tags.value, tags.outer, trimmed=False)
        self._names = tags
        self._state: Literal["call", "name", "separator", "key or end", "key", "value tag"] = (
            "call" if tags.around else "name"
        )
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
        self._state = "separator" if self._names.after_name else "key or end"
        self._begin_call(name)
        return end

    def _read_tag(self, text: str, at: int) -> int:
        if not self._tag and text[at] in BLANKS:
            return at + 1
        tag, tags = self._tag + text[at], self._names
        within = tags.key, tags.call_end
        match self._state:
            case "call":
                known: tuple[str, ...] = (tags.call,)
            case "separator":
                known = (tags.after_name, *within)
            case "value tag":
                known = (tags.value,)
            case _:
                known = within
        if not any(each.startswith(tag) for each in known):
            self._break(self._tag)
            return at
        self._tag = "" if tag in known else tag
        if tag == tags.call:
            self._state = "name"
        elif tag == tags.after_name:
            self._state = "key or end"
        elif tag == tags.key:
            self._state, self._search = "key", MarkerSearch(tags.key_end, tags.value, tags.call_end)
        elif tag == tags.value:
            self._end_key()
        elif tag == tags.call_end:
            self.done = True
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        before, rest = self._search.feed(text[at:])
        self._word.append(before)
        if rest is None:
            return len(text)
        if self._search.found == self._names.value:  # the key is not closed
            self._end_key()
        elif self._search.found == self._names.call_end:
            self.done = True
        else:
            self._state = "value tag"
        return len(text) - len(rest)

    def _end_key(self) -> None:
        key = "".join(self._word).strip()
        self._word.clear()
        self._state = "key or end"
        self._begin_value(key)
