"""The grammar of an answer that calls tools, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from aengine.structured import Thought
from aengine.text.answer.syntax import CallSyntax
from aengine.text.answer.thought import THOUGHT_BEGIN
from aengine.text.grammar.thoughts import ANYTHING, marker, not_beginning, text_with, thought_rules, till, without

# JSON as chat templates write it and models learn it. Without free white space no answer can end in endless blanks.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LINE = json.dumps("\n")
_PLACE = "  // from "  # before a comment that says where in the request a line comes from
PLACED = re.compile(rf"{_PLACE}(\S+)$", re.MULTILINE)
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallableTool(msgspec.Struct, frozen=True):
    """A tool that may be called.

    parameters: the arguments' JSON schema; None: there are none. strict: what the compiler does not know of it is
    refused; else it is not enforced, and the arguments are the client's to check. where: the schema's place in the
    request, for errors.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    where: str = ""


class CallGrammar(msgspec.Struct, frozen=True):
    """Calls of some tools, with `parallel` any number of them.

    tokens: the markers that are tokens of their own, which are then no text. Before an answer a thought may come where
    it is `possible`; `open` means that the prompt has begun it.
    """

    tools: Collection[CallableTool]
    syntax: CallSyntax
    parallel: bool = True
    tokens: Collection[str] = ()

    def forced(self, thought: Thought = "never") -> str:
        """A grammar of at least one call, and nothing else."""
        head, thinking = thought_rules(thought, self.tokens)
        return "\n".join([f"start: {head}calls", self.rules(), *thinking])

    def rules(self) -> str:
        """Rules of which `calls` describes at least one call."""
        begin = "" if self.syntax.bare else f"{self._begin} {_LINE} "
        more = f" ({json.dumps(self.syntax.separator)} call)*" if self.parallel else ""
        return "\n".join([f"calls: call{more}", f"call: {begin}called", *self._called()])

    def within_text(self, thought: Thought = "never") -> str:
        """A grammar of any text in which whatever the parser takes for a call is one of these.

        Where the syntax knows calls without a marker, nothing follows them.
        """
        head, thinking = thought_rules(thought, self.tokens)
        # A thought begins where an answer does; elsewhere its markers are text like any other.
        hidden = {self.syntax.begin} if thought == "never" else {self.syntax.begin, THOUGHT_BEGIN}
        others = [token for token in sorted(self.tokens) if token not in hidden]
        text = f"{ANYTHING} & {without(self.syntax.begin)}"
        first = text + (f" & {not_beginning(THOUGHT_BEGIN)}" if thought == "possible" else "")
        if self.syntax.bare:
            first += f" & {not_beginning('{')}"
            rules = [self._text_or_calls(others), self.rules()]
            start = f"start: {head}unthinking"
        else:
            rules = self._text_around_calls(others) + self._called()
            start = "start: thought answer | unthinking" if thought == "possible" else f"start: {head}answer"
        return "\n".join([start, *rules, f"TEXT: {text}", f"FIRST: {first}", *thinking])

    @property
    def _begin(self) -> str:
        return marker(self.syntax.begin, self.tokens)

    def _text_or_calls(self, others: Collection[str]) -> str:
        behind = f" ({self._begin} calls)?" if self.syntax.begin in self.tokens else ""
        return f"unthinking: {self._begin}? calls | {text_with('TEXT', others, 'FIRST')}{behind}"

    def _text_around_calls(self, others: Collection[str]) -> list[str]:
        """`answer`, and `unthinking`, which does not begin as a thought does."""
        text, first, count = (
            text_with("TEXT", others),
            text_with("TEXT", others, "FIRST"),
            "*" if self.parallel else "?",
        )
        if self.syntax.begin in self.tokens:
            return [
                f"answer: {text} (call {text}){count}",
                f"unthinking: {first} (call {text}){count}",
                f"call: {self._begin} {_LINE} called",
            ]
        # Till the marker, and with it: where it is text, nothing else ends the text before it.
        return [
            f"answer: ({till('till_call', 'TEXT', others)} {_LINE} called){count} {text}",
            f"unthinking: {first} | first_call {_LINE} called {'answer' if self.parallel else text}",
            f"till_call[suffix={self._begin}]: /(.|\\n)*/",
            f"first_call[suffix={self._begin}]: UNTHINKING",
            f"UNTHINKING: /(.|\\n)*/ & {not_beginning(THOUGHT_BEGIN)}",
        ]

    def _called(self) -> list[str]:
        """Rules of which `called` describes a call from its object on."""
        names = [f"call_{index}" for index in range(len(self.tools))]
        after = f" {_LINE} {marker(self.syntax.end, self.tokens)}" if self.syntax.end else ""
        rules = [f"called: ({' | '.join(names)}){after}"]
        for rule, tool in zip(names, self.tools, strict=True):
            head = f'{{"name": {json.dumps(tool.name)}, "{self.syntax.arguments}": '
            rules.append(f'{rule}: {json.dumps(head)} {rule}_arguments "}}"')
            rules.append(f"{rule}_arguments: %json {json.dumps(_arguments(tool))}{_PLACE}{tool.where}")
        return rules


def _arguments(tool: CallableTool) -> dict[str, Any]:
    schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    return {**schema, "type": "object", "x-guidance": {**_JSON_OPTIONS, "lenient": not tool.strict}}
