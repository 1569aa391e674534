"""A thought before an answer that has a grammar, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from aengine.structured import Thought
from aengine.text.reasoning import THOUGHT_BEGIN, THOUGHT_END

ANYTHING = "/(.|\\n)+/"


def thought_rules(thought: Thought, tokens: Collection[str]) -> tuple[str, list[str]]:
    """What a start rule begins with, and the rules that this refers to.

    tokens: those markers that are tokens of their own, which are then no text. After the thought up to two line breaks
    may follow. Where the markers are text, an answer that may begin as a thought does is taken for one no more: the
    lexer keeps to what matches longest.
    """
    if thought == "never":
        return "", []
    head = "thought? " if thought == "possible" else "thought "
    # Some models repeat what the prompt ends with.
    begin = marker(THOUGHT_BEGIN, tokens) + (" " if thought == "possible" else "? ")
    if THOUGHT_END not in tokens:
        return head, [
            f"thought: {begin}thinking /\\n{{0,2}}/",
            f"thinking[suffix={json.dumps(THOUGHT_END)}]: /(.|\\n)*/",
        ]
    others = [token for token in sorted(tokens) if token != THOUGHT_END]
    return head, [
        f"thought: {begin}{text_with('THINKING', others)} {THOUGHT_END} /\\n{{0,2}}/",
        f"THINKING: {ANYTHING} & {without(THOUGHT_END)}",
    ]


def marker(text: str, tokens: Collection[str]) -> str:
    """A marker as a grammar names it."""
    return text if text in tokens else json.dumps(text)


def text_with(terminal: str, tokens: Collection[str]) -> str:
    """A text and these tokens in any order. Two texts never meet, or they could be one that the terminal forbids."""
    return f"{terminal}? (({' | '.join(tokens)}) {terminal}?)*" if tokens else f"{terminal}?"


def without(text: str) -> str:
    """What does not contain a text."""
    return f"~/(.|\\n)*{_pattern(text)}(.|\\n)*/"


def not_beginning(text: str) -> str:
    """What does not begin with a text, blanks before it (as Python strips them) or not."""
    return f"~/[\\s\\x1c-\\x1f]*{_pattern(text)}(.|\\n)*/"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
