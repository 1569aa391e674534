"""A thought before an answer that has a grammar, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from aengine.structured import Thought
from aengine.text.answer.thought import THOUGHT_BEGIN, THOUGHT_END

ANYTHING = "/(.|\\n)+/"


def thought_rules(thought: Thought, tokens: Collection[str]) -> tuple[str, list[str]]:
    """What a start rule begins with, and the rules that this refers to.

    tokens: those markers that are tokens of their own, which are then no text. After the thought up to two line breaks
    may follow. Where the markers are text, an answer that may begin as a thought does can swallow one: the lexer keeps
    to what matches longest.
    """
    if thought == "never":
        return "", []
    head = "thought? " if thought == "possible" else "thought "
    # Some models repeat what the prompt ends with.
    begin = marker(THOUGHT_BEGIN, tokens) + (" " if thought == "possible" else "? ")
    others = [token for token in sorted(tokens) if token != THOUGHT_END]
    if THOUGHT_END not in tokens:
        return head, [
            f"thought: {begin}{till('thinking', 'THINKING', others)} /\\n{{0,2}}/",
            f"thinking[suffix={json.dumps(THOUGHT_END)}]: /(.|\\n)*/",
            f"THINKING: {ANYTHING} & {without(THOUGHT_END)}",
        ]
    return head, [
        f"thought: {begin}{text_with('THINKING', others)} {THOUGHT_END} /\\n{{0,2}}/",
        f"THINKING: {ANYTHING} & {without(THOUGHT_END)}",
    ]


def marker(text: str, tokens: Collection[str]) -> str:
    """A marker as a grammar names it."""
    return text if text in tokens else json.dumps(text)


def text_with(terminal: str, tokens: Collection[str], first: str | None = None) -> str:
    """A text and these tokens in any order. Two texts never meet, or they could be one that the terminal forbids.

    first: another terminal for the text before any token.
    """
    further = f" (({' | '.join(tokens)}) {terminal}?)*" if tokens else ""
    return f"{first or terminal}?{further}"


def till(last: str, terminal: str, tokens: Collection[str]) -> str:
    """The same, and at its end `last`, a text up to a marker that is text as well, with it."""
    return f"({terminal}? ({' | '.join(tokens)}))* {last}" if tokens else last


def without(text: str) -> str:
    """What does not contain a text."""
    return f"~/(.|\\n)*{_pattern(text)}(.|\\n)*/"


def not_beginning(text: str) -> str:
    """What does not begin with a text, blanks before it (as Python strips them) or not."""
    return f"~/[\\s\\x1c-\\x1f]*{_pattern(text)}(.|\\n)*/"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
