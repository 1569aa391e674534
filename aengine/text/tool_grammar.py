"""The grammar of an answer that calls tools, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from aengine.structured import Thought
from aengine.text.reasoning import THOUGHT_BEGIN
from aengine.text.thought_grammar import ANYTHING, marker, not_beginning, text_with, thought_rules, till, without
from aengine.text.tool_syntax import CallSyntax

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


def forced_calls(
    tools: Collection[CallableTool],
    syntax: CallSyntax,
    *,
    parallel: bool = True,
    thought: Thought = "never",
    tokens: Collection[str] = (),
) -> str:
    """A grammar of one call, with `parallel` of any number but none.

    A thought may come first where it is `possible`; `open` means that the prompt has begun it. tokens: the markers that
    are tokens of their own, which are then no text.
    """
    head, thinking = thought_rules(thought, tokens)
    return "\n".join([f"start: {head}calls", call_rules(tools, syntax, parallel=parallel, tokens=tokens), *thinking])


def call_rules(
    tools: Collection[CallableTool], syntax: CallSyntax, *, parallel: bool = True, tokens: Collection[str] = ()
) -> str:
    """Rules of which `calls` describes one call, with `parallel` more."""
    begin = "" if syntax.bare else f"{marker(syntax.begin, tokens)} {_LINE} "
    more = f" ({json.dumps(syntax.separator)} call)*" if parallel else ""
    return "\n".join([f"calls: call{more}", f"call: {begin}called", *_called(tools, syntax, tokens)])


def text_with_calls(
    tools: Collection[CallableTool],
    syntax: CallSyntax,
    *,
    parallel: bool = True,
    thought: Thought = "never",
    tokens: Collection[str] = (),
) -> str:
    """A grammar of any text in which whatever the parser takes for a call is one of these, as for `forced_calls`.

    Without `parallel` at most one. Where the syntax knows calls without a marker, nothing follows them.
    """
    head, thinking = thought_rules(thought, tokens)
    # A thought begins where an answer does; elsewhere its markers are text like any other.
    hidden = {syntax.begin} if thought == "never" else {syntax.begin, THOUGHT_BEGIN}
    others = [token for token in sorted(tokens) if token not in hidden]
    text = f"{ANYTHING} & {without(syntax.begin)}"
    first = text + (f" & {not_beginning(THOUGHT_BEGIN)}" if thought == "possible" else "")
    if syntax.bare:
        first += f" & {not_beginning('{')}"
        rules = _text_or_bare_calls(syntax, others, tokens)
        rules.append(call_rules(tools, syntax, parallel=parallel))
        start = f"start: {head}unthinking"
    else:
        rules = _text_around_calls(syntax, others, tokens, "*" if parallel else "?")
        rules += _called(tools, syntax, tokens)
        start = "start: thought answer | unthinking" if thought == "possible" else f"start: {head}answer"
    return "\n".join([start, *rules, f"TEXT: {text}", f"FIRST: {first}", *thinking])


def _text_or_bare_calls(syntax: CallSyntax, others: Collection[str], tokens: Collection[str]) -> list[str]:
    begin = marker(syntax.begin, tokens)
    behind = f" ({begin} calls)?" if syntax.begin in tokens else ""
    return [f"unthinking: {begin}? calls | {text_with('TEXT', others, 'FIRST')}{behind}"]


def _text_around_calls(syntax: CallSyntax, others: Collection[str], tokens: Collection[str], count: str) -> list[str]:
    """`answer`, and `unthinking`, which does not begin as a thought does. count: of calls."""
    begin = marker(syntax.begin, tokens)
    text, first = text_with("TEXT", others), text_with("TEXT", others, "FIRST")
    if syntax.begin in tokens:
        return [
            f"answer: {text} (call {text}){count}",
            f"unthinking: {first} (call {text}){count}",
            f"call: {begin} {_LINE} called",
        ]
    # Till the marker, and with it: where it is text, nothing else ends the text before it.
    further = "answer" if count == "*" else text
    return [
        f"answer: ({till('till_call', 'TEXT', others)} {_LINE} called){count} {text}",
        f"unthinking: {first} | first_call {_LINE} called {further}",
        f"till_call[suffix={begin}]: /(.|\\n)*/",
        f"first_call[suffix={begin}]: UNTHINKING",
        f"UNTHINKING: /(.|\\n)*/ & {not_beginning(THOUGHT_BEGIN)}",
    ]


def _called(tools: Collection[CallableTool], syntax: CallSyntax, tokens: Collection[str]) -> list[str]:
    """Rules of which `called` describes a call from its object on."""
    names = [f"call_{index}" for index in range(len(tools))]
    after = f" {_LINE} {marker(syntax.end, tokens)}" if syntax.end else ""
    rules = [f"called: ({' | '.join(names)}){after}"]
    for rule, tool in zip(names, tools, strict=True):
        head = f'{{"name": {json.dumps(tool.name)}, "{syntax.arguments}": '
        rules.append(f'{rule}: {json.dumps(head)} {rule}_arguments "}}"')
        rules.append(f"{rule}_arguments: %json {json.dumps(_arguments(tool))}{_PLACE}{tool.where}")
    return rules


def _arguments(tool: CallableTool) -> dict[str, Any]:
    schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    return {**schema, "type": "object", "x-guidance": {**_JSON_OPTIONS, "lenient": not tool.strict}}
