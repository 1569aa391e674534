"""The grammar of an answer that calls tools, in Lark's notation as llguidance reads it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from aengine.requests.structured import Thought
from aengine.text.answer.formats.base import CallableTool, CallFormat, CallSyntax
from aengine.text.answer.lark import (
    ANYTHING,
    Tokens,
    any_of,
    literal,
    marker,
    not_beginning,
    sequence,
    text_until,
    text_with,
    without,
)
from aengine.text.answer.thought import THINK, ThoughtMarkers
from aengine.text.grammar.schemas import bounded_numbers, compilable_schema


def thought_rules(thought: Thought, tokens: Tokens, markers: ThoughtMarkers) -> tuple[str, list[str]]:
    """Return the beginning of a start rule for answers with a thought, and the rules that it refers to.

    tokens: the markers that are single tokens; these are never text. Up to two line breaks may follow the thought. If
    the markers are text, an answer that begins like a thought may be read as part of it: the lexer takes the longest
    match.
    """
    if thought == "never":
        return "", []
    head = "thought? " if thought == "possible" else "thought "
    # Some models repeat the marker with which the prompt ends.
    token, _ = markers.tokens
    begin = sequence(marker(token, tokens), literal(markers.begin.removeprefix(token)))
    begin = f"({begin})" + (" " if thought == "possible" else "? ")
    others = any_of(tokens, markers.end)
    if markers.end not in tokens:
        return head, [
            f"thought: {begin}{text_until('thinking', 'THINKING', others)} /\\n{{0,2}}/",
            f"thinking[suffix={literal(markers.end)}]: /(.|\\n)*/",
            f"THINKING: {ANYTHING} & {without(markers.end)}",
        ]
    return head, [
        f"thought: {begin}{text_with('THINKING', others)} {marker(markers.end, tokens)} /\\n{{0,2}}/",
        f"THINKING: {ANYTHING} & {without(markers.end)}",
    ]


class CallGrammar(msgspec.Struct, frozen=True):
    """Builds grammars of answers that call `tools`; any number of calls if `parallel`.

    tokens: the markers that are single tokens; these are never text. A `possible` thought may come before the answer.
    The prompt has begun an `open` thought.
    """

    tools: Collection[CallableTool]
    form: CallFormat
    parallel: bool = True
    tokens: Tokens = {}
    thoughts: ThoughtMarkers = THINK

    def forced(self, thought: Thought = "never") -> str:
        """Return a grammar of at least one call and nothing else."""
        head, thinking = thought_rules(thought, self.tokens, self.thoughts)
        return "\n".join([f"start: {head}calls", self.rules(), *thinking])

    def rules(self) -> str:
        """Return rules in which `calls` describes at least one call."""
        syntax = self._syntax
        several = self.parallel and syntax.between is not None
        more = f"({sequence(literal(syntax.between or ''), 'call')})*" if several else ""
        first = "group" if syntax.has_bare_calls else "call"
        rules = [f"call: {self._begin} group"] if more or not syntax.has_bare_calls else []
        return "\n".join([f"calls: {sequence(first, more)}", *rules, *self._group()])

    def within_text(self, thought: Thought = "never") -> str:
        """Return a grammar of free text in which the parser can find only calls that match the rules.

        If the syntax has calls without a marker, nothing may follow them.
        """
        syntax, thoughts = self._syntax, self.thoughts
        head, thinking = thought_rules(thought, self.tokens, thoughts)
        # A thought comes at an answer's beginning. Elsewhere its markers are text like any other.
        others = any_of(self.tokens, syntax.begin, *(() if thought == "never" else (thoughts.tokens[0],)))
        text = f"{ANYTHING} & {without(syntax.begin)}" if syntax.begin else ANYTHING
        first = text + (f" & {not_beginning(thoughts.begin)}" if thought == "possible" else "")
        if syntax.has_bare_calls:
            first += f" & {not_beginning(*syntax.bare_beginnings(tool.name for tool in self.tools))}"
            rules = [self._text_or_calls(others), self.rules()]
            start = f"start: {head}unthinking"
        else:
            rules = self._text_around_calls(others) + self._group()
            start = "start: thought answer | unthinking" if thought == "possible" else f"start: {head}answer"
        return "\n".join([start, *rules, f"TEXT: {text}", f"FIRST: {first}", *thinking])

    @property
    def _syntax(self) -> CallSyntax:
        return self.form.syntax

    @property
    def _begin(self) -> str:
        return marker(self._syntax.begin, self.tokens)

    def _text_or_calls(self, others: str) -> str:
        begin = self._begin
        after = f" ({begin} calls)?" if self._syntax.begin in self.tokens else ""
        calls = f"{begin}? calls" if begin else "calls"
        return f"unthinking: {calls} | {text_with('TEXT', others, 'FIRST')}{after}"

    def _text_around_calls(self, others: str) -> list[str]:
        """Return the rules `answer`, and `unthinking`, which does not begin like a thought."""
        text, first = text_with("TEXT", others), text_with("TEXT", others, "FIRST")
        count = "*" if self.parallel else "?"
        if self._syntax.begin in self.tokens:
            return [
                f"answer: {text} (call {text}){count}",
                f"unthinking: {first} (call {text}){count}",
                f"call: {self._begin} group",
            ]
        # The marker is text, so that nothing else ends the text before it. So these terminals include the marker.
        return [
            f"answer: ({text_until('till_call', 'TEXT', others)} group){count} {text}",
            f"unthinking: {first} | first_call group {'answer' if self.parallel else text}",
            f"till_call[suffix={self._begin}]: /(.|\\n)*/",
            f"first_call[suffix={self._begin}]: UNTHINKING",
            f"UNTHINKING: /(.|\\n)*/ & {not_beginning(self.thoughts.begin)}",
        ]

    def _group(self) -> list[str]:
        """Return rules in which `group` describes the text after the marker."""
        syntax = self._syntax
        several = self.parallel and syntax.separator is not None
        more = f"({sequence(literal(syntax.separator or ''), 'called')})*" if several else ""
        closing = literal(syntax.closing.removesuffix(syntax.end)), marker(syntax.end, self.tokens)
        names = [f"call_{index}" for index in range(len(self.tools))]
        rules = [
            f"group: {sequence(syntax.opening, 'called', more, *closing)}",
            f"called: {' | '.join(names)}",
        ]
        for name, tool in zip(names, self.tools, strict=True):
            rules += self.form.rules(name, compilable_tool(tool), self.tokens)
        return list(dict.fromkeys(rules))  # some rules are the same for all tools


def compilable_tool(tool: CallableTool) -> CallableTool:
    """Return the tool with a schema that the compiler takes: numbers are bounded, and unknown keywords are left out."""
    if tool.parameters is None:
        return tool
    parameters = compilable_schema(tool.parameters, tool.where, strict=tool.strict)
    return replace(tool, parameters=bounded_numbers(parameters))
