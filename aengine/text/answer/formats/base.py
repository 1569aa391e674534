"""The interface of a call format: the syntax between calls, a reader of one call, and grammar rules."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from aengine.text.answer.lark import Tokens, json_value

BLANKS = " \t\r\n"  # between the parts of a call
Schema = Mapping[str, Any]
# the tools that may be called, with the JSON schemas of their arguments; None for tools without one
Tools = Mapping[str, Schema | None]


class CallableTool(msgspec.Struct, frozen=True):
    """A tool that may be called.

    parameters: the JSON schema of the arguments; None if there are none. strict: refuse a schema that the grammar
    compiler does not support; else the client must check the arguments. where: the schema's place in the request, for
    errors.
    """

    name: str
    parameters: Schema | None = None
    strict: bool = False
    where: str = ""


_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


def object_schema(tool: CallableTool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are always an object."""
    return {**(_NO_PARAMETERS if tool.parameters is None else tool.parameters), "type": "object"}


def arguments_rule(rule: str, tool: CallableTool) -> str:
    """Return the rule `{rule}_arguments` of a tool's arguments as JSON."""
    return f"{rule}_arguments: {json_value(object_schema(tool), tool.where, lenient=not tool.strict)}"


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """The text around calls. A group has a marker, one or more calls, and an end: `begin opening call ... closing`.

    The format's reader and rules define the text of a call itself. Blanks may stand between all parts; a grammar writes
    only those given here.
    """

    begin: str = ""  # the marker before a group; empty if there is none
    begins: Mapping[str, str] = {}  # markers that some models write instead, each with a further text after `end`
    unmarked: str = ""  # the first marker within a call, by which a call without `begin` is recognised
    after_name: str = ""  # another such marker, which follows the call's name
    bare: str = ""  # a character with which an answer may begin a group without the marker
    after_bare_name: str = ""  # the text after the name, if such a group begins with the name instead
    before_name: str = ""  # the text from that character to the call's name, without blanks
    opening: str = ""  # the text after the marker in Lark's notation; the first call's reader reads it
    separator: str | None = None  # the text between the calls of a group; None if a group has one call
    closing: str = ""  # the text after the last call, including the end
    end: str = ""  # the end of a group; empty if its last call ends it
    further: str = ""  # characters that begin another call of the group
    noise: str = BLANKS  # characters after a call that are ignored
    between: str | None = None  # the text between groups; None if an answer of calls alone has one group
    inner: tuple[str, ...] = ()  # markers within a call

    @property
    def has_bare_calls(self) -> bool:
        """Whether an answer may begin a group without the marker."""
        return bool(self.bare or self.after_bare_name)

    def bare_beginnings(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the texts with one of which such a group begins. names: of the tools that may be called."""
        named = [f"{name}{self.after_bare_name}" for name in names] if self.after_bare_name else [self.bare]
        return tuple(filter(None, named))

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers, which may be single tokens of a vocabulary."""
        written = (self.begin, *self.begins, self.end, *self.begins.values(), *self.inner)
        return tuple(marker for marker in written if len(marker) > 1)


class CallReader(Protocol):
    """Parses the text of one call, given in any pieces.

    Once a call has begun, it stays one, and the caller can take its arguments as they come. They are JSON once the call
    is done, broken or closed. `raw` has all the text until the call begins. Time is linear.
    """

    @property
    def name(self) -> str | None: ...

    @property
    def id(self) -> str | None:
        """The call's id, if the model wrote one before the arguments."""
        ...

    @property
    def begun(self) -> bool: ...

    @property
    def done(self) -> bool:
        """Whether the call is complete."""
        ...

    @property
    def broken(self) -> bool:
        """Whether the next character cannot be part of a call."""
        ...

    @property
    def raw(self) -> list[str]: ...

    @property
    def left(self) -> str:
        """Text that was fed and follows a broken call."""
        ...

    def feed(self, text: str) -> int:
        """Parse more text. Returns how many characters belong to the call: all, unless it is then done or broken."""
        ...

    def settle(self) -> str:
        """Stop waiting for closing tags of values. From now on, the first tag of a value's own level or of an outer one
        ends the value. Returns the text that waited, to be parsed again.
        """
        ...

    def close(self) -> None:
        """End the text: complete the arguments of a call that has begun."""
        ...

    def take_arguments(self) -> str:
        """Return the new JSON of the arguments; nothing before the call has begun."""
        ...


class CallFormat(ABC):
    """A format of tool calls, for the parser and for grammars."""

    syntax: CallSyntax

    @abstractmethod
    def detect(self, template: str) -> bool:
        """Return whether a chat template uses this format. Formats are tried in the order of their table."""

    @abstractmethod
    def reader(self, tools: Tools, first: bool) -> CallReader:
        """Return a reader of a call of one of `tools`. The first reader of a group also reads the group's opening."""

    @abstractmethod
    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        """Return rules in Lark's notation in which `rule` describes a call of the tool.

        Names of rules begin with `rule`, except for rules that are the same for all tools.
        """

    def new_id(self) -> str:
        """Return a random id for a call; by default one like OpenAI's."""
        return call_id()


def call_id() -> str:
    """Return an id like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"
