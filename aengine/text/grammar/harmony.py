"""The grammar of an answer in harmony, the format of gpt-oss, in Lark's notation as llguidance reads it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from aengine.text.answer.formats.base import CallableTool, arguments_rule
from aengine.text.answer.harmony import CHANNEL, CONSTRAIN, CONTROL, END, MESSAGE, START
from aengine.text.answer.lark import Tokens, literal, marker, pattern, sequence
from aengine.text.grammar.calls import compilable_tool


class HarmonyGrammar(msgspec.Struct, frozen=True):
    """Builds grammars of messages that call `tools`; any number of calls if `parallel`.

    tokens: the control tokens, which are never text.
    """

    tools: Collection[CallableTool]
    parallel: bool = True
    tokens: Tokens = {}

    def forced(self) -> str:
        """Return a grammar of at least one call, after thoughts."""
        head, thinking = harmony_thoughts(self.tokens)
        return "\n".join([f"start: {head}calls", self.rules(), *thinking])

    def rules(self) -> str:
        """Return rules in which `calls` describes at least one call."""
        more = f"({_next(self.tokens)} call)*" if self.parallel else ""
        return "\n".join([f"calls: {sequence('call', more)}", *self._call()])

    def free(self) -> str:
        """Return a grammar of any messages, in which the parser can find only calls that match the rules."""
        tokens, between = self.tokens, _next(self.tokens)
        said = f"{marker(CHANNEL, tokens)} SHOWN {marker(MESSAGE, tokens)} TEXT?"
        most = f"(said | call) ({between} (said | call))*" if self.parallel else f"(said {between})* (said | call)"
        shown = 'SHOWN: "analysis" | "commentary" | "final"'
        return "\n".join([f"start: {most}", f"said: {said}", shown, *self._call(), _text(tokens)])

    def _call(self) -> list[str]:
        tokens = self.tokens
        names = [f"call_{index}" for index in range(len(self.tools))]
        # The model's own header, and that of its chat template. The end of the answer ends the call.
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
                arguments_rule(name, tool),
            ]
        return rules


def harmony_thoughts(tokens: Tokens) -> tuple[str, list[str]]:
    """Return the beginning of a start rule for answers with thoughts, and the rules that it refers to."""
    thought = f"{marker(CHANNEL, tokens)} {literal('analysis')} {marker(MESSAGE, tokens)} TEXT? {_next(tokens)}"
    return "thought* ", [f"thought: {thought}", _text(tokens)]


def harmony_final(tokens: Tokens) -> str:
    """Return the header of the answer itself."""
    json_type = f"({literal(' ')} {marker(CONSTRAIN, tokens)} {literal('json')})?"
    return f"{marker(CHANNEL, tokens)} {literal('final')} {json_type} {marker(MESSAGE, tokens)}"


def _next(tokens: Tokens) -> str:
    """Return the end of a message and the beginning of the next one."""
    return f"{marker(END, tokens)} {marker(START, tokens)} {literal('assistant')}"


def _text(tokens: Tokens) -> str:
    """Return a terminal of text that spells out no control token.

    If the vocabulary lacks the control tokens, nothing else could end the text. It may then not contain `<`.
    """
    if not tokens.keys() >= set(CONTROL):
        return "TEXT: /[^<]+/"
    spelled = "|".join(map(pattern, CONTROL))
    return f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*({spelled})(.|\\n)*/"
