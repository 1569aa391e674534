"""The grammar of an answer in harmony, the format of gpt-oss, in Lark's notation as llguidance reads it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from aengine.text.answer.formats.base import CallableTool, object_schema
from aengine.text.answer.harmony import CHANNEL, CONSTRAIN, CONTROL, END, MESSAGE, START
from aengine.text.answer.lark import Tokens, json_value, literal, marker, pattern, sequence
from aengine.text.grammar.calls import compilable_tool


class HarmonyGrammar(msgspec.Struct, frozen=True):
    """Messages of an answer, calls of some tools among them, with `parallel` any number of these.

    tokens: the control tokens, which are no text.
    """

    tools: Collection[CallableTool]
    parallel: bool = True
    tokens: Tokens = {}

    def forced(self) -> str:
        """A grammar of at least one call, thoughts before it."""
        head, thinking = harmony_thoughts(self.tokens)
        return "\n".join([f"start: {head}calls", self.rules(), *thinking])

    def rules(self) -> str:
        """Rules of which `calls` describes at least one call."""
        more = f"({_next(self.tokens)} call)*" if self.parallel else ""
        return "\n".join([f"calls: {sequence('call', more)}", *self._call()])

    def free(self) -> str:
        """A grammar of any messages, in which every call that the parser would find is one of these."""
        tokens, behind = self.tokens, _next(self.tokens)
        said = f"{marker(CHANNEL, tokens)} SHOWN {marker(MESSAGE, tokens)} TEXT?"
        most = f"(said | call) ({behind} (said | call))*" if self.parallel else f"(said {behind})* (said | call)"
        shown = 'SHOWN: "analysis" | "commentary" | "final"'
        return "\n".join([f"start: {most}", f"said: {said}", shown, *self._call(), _text(tokens)])

    def _call(self) -> list[str]:
        tokens = self.tokens
        names = [f"call_{index}" for index in range(len(self.tools))]
        # As the model writes it, and as its chat template does. The answer's end is the call's.
        json_type = f"{marker(CONSTRAIN, tokens)} {literal('json')}"
        rules = [f"call: {' | '.join(names)}"]
        for name, tool in zip(names, map(compilable_tool, self.tools), strict=True):
            to = f"to=functions.{tool.name}"
            own = sequence(marker(CHANNEL, tokens), literal(f"commentary {to} "), json_type)
            templates = sequence(
                literal(f" {to}"), marker(CHANNEL, tokens), f'("commentary json" | "commentary " {json_type})'
            )
            rules += [
                f"{name}: ({own} | {templates}) {marker(MESSAGE, tokens)} {name}_arguments",
                f"{name}_arguments: {json_value(object_schema(tool), tool.where, lenient=not tool.strict)}",
            ]
        return rules


def harmony_thoughts(tokens: Tokens) -> tuple[str, list[str]]:
    """What a start rule begins with where thoughts may come first, and the rules that this refers to."""
    thought = f"{marker(CHANNEL, tokens)} {literal('analysis')} {marker(MESSAGE, tokens)} TEXT? {_next(tokens)}"
    return "thought* ", [f"thought: {thought}", _text(tokens)]


def harmony_final(tokens: Tokens) -> str:
    """The header of the answer itself."""
    json_type = f"({literal(' ')} {marker(CONSTRAIN, tokens)} {literal('json')})?"
    return f"{marker(CHANNEL, tokens)} {literal('final')} {json_type} {marker(MESSAGE, tokens)}"


def _next(tokens: Tokens) -> str:
    """The end of a message and the beginning of another one."""
    return f"{marker(END, tokens)} {marker(START, tokens)} {literal('assistant')}"


def _text(tokens: Tokens) -> str:
    """A terminal of text in which no control token is spelled out. Where these are no tokens, nothing else could end
    it: without `<`.
    """
    if not tokens.keys() >= set(CONTROL):
        return "TEXT: /[^<]+/"
    spelled = "|".join(map(pattern, CONTROL))
    return f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*({spelled})(.|\\n)*/"
