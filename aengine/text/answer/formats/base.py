"""The interface of a format of tool calls: the syntax between calls, a reader of one call, and grammar rules."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from aengine.text.answer.lark import Tokens

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema | None]  # those that may be called: the JSON schema of each one's arguments, if it has one


class CallableTool(msgspec.Struct, frozen=True):
    """A tool that may be called.

    parameters: the arguments' JSON schema; None: there are none. strict: what the compiler does not know of it is
    refused; else it is not enforced, and the arguments are the client's to check. where: the schema's place in the
    request, for errors.
    """

    name: str
    parameters: Schema | None = None
    strict: bool = False
    where: str = ""


_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


def object_schema(tool: CallableTool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object in any case."""
    return {**(_NO_PARAMETERS if tool.parameters is None else tool.parameters), "type": "object"}


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """The text around calls. A group is a marker, one call or several, and an end: `begin opening call ... closing`.

    A call's own text is its reader's and its rules'. Blanks are read wherever they may stand; a grammar writes them as
    they are given here.
    """

    begin: str = ""  # the marker before a group; empty: there is none
    begins: Mapping[str, str] = {}  # others that some models write in its place, and what then comes after `end`
    unmarked: str = ""  # a marker within a call that a call without `begin` can be told by, and which it begins with
    after_name: str = ""  # another one, which the call's name stands before
    bare: str = ""  # a character with which an answer may begin a group, without the marker
    opening: str = ""  # behind the marker, as Lark has it; to read it is the first call's reader's
    separator: str | None = None  # between the calls of a group; None: a group has one
    closing: str = ""  # behind the last call, the end in it
    end: str = ""  # what ends a group; empty: its last call does
    further: str = ""  # characters that begin another call of the group
    noise: str = " \t\r\n"  # characters that may stand behind a call and are not spoken of
    between: str | None = None  # between groups; None: an answer without text has one
    inner: tuple[str, ...] = ()  # markers within a call

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers, which a vocabulary may have as tokens of their own."""
        written = (self.begin, *self.begins, self.end, *self.begins.values(), *self.inner)
        return tuple(marker for marker in written if len(marker) > 1)


class CallReader(Protocol):
    """Parses the text of one call, given in any pieces.

    Once it has begun it stays a call, and its arguments can be taken as they come. They are JSON once it is done,
    broken or closed. Until it has begun `raw` has all the text. Time is linear.
    """

    @property
    def name(self) -> str | None: ...

    @property
    def id(self) -> str | None:
        """The call's id, where the model wrote one before the arguments."""
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
        """Text that was taken and belongs to what follows a call that is broken."""
        ...

    def feed(self, text: str) -> int:
        """Parse more text; returns how many characters belong to the call. All of them, unless it is then done or
        broken.
        """
        ...

    def settle(self) -> str:
        """Give up waiting for the end of a value whose closing tag may still come: the first tag of its own level or of
        an outer one ends it, from now on. Returns the text that waited, to be parsed again.
        """
        ...

    def close(self) -> None:
        """End the text: complete the arguments of a call that has begun."""
        ...

    def take_arguments(self) -> str:
        """The JSON of the arguments that has come since the last time; nothing before the call has begun."""
        ...


class CallFormat(Protocol):
    """A format of tool calls, for the parser and for grammars."""

    @property
    def syntax(self) -> CallSyntax: ...

    def detect(self, template: str) -> bool:
        """Whether a chat template uses this format. Formats are asked in the order of their table."""
        ...

    def reader(self, tools: Tools, first: bool) -> CallReader:
        """A reader of a call of one of `tools`; the first one of a group reads the group's opening as well."""
        ...

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        """Rules in Lark's notation of which `rule` describes a call of the tool.

        Names begin with `rule`, but for rules that are the same for all tools.
        """
        ...

    def new_id(self) -> str:
        """A random id for a call."""
        ...


def call_id() -> str:
    """An id in the form of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"
