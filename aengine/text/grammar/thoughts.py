"""Grammar rules of a thought before an answer, in Lark's notation as llguidance reads it."""

from __future__ import annotations

from aengine.requests.structured import Thought
from aengine.text.answer.lark import ANYTHING, Tokens, any_of, literal, marker, sequence, text_with, till, without
from aengine.text.answer.thought import ThoughtMarkers


def thought_rules(thought: Thought, tokens: Tokens, markers: ThoughtMarkers) -> tuple[str, list[str]]:
    """What a start rule begins with, and the rules that this refers to.

    tokens: those markers that are tokens of their own, which are then no text. After the thought up to two line breaks
    may follow. Where the markers are text, an answer that may begin as a thought does can swallow one: the lexer keeps
    to what matches longest.
    """
    if thought == "never":
        return "", []
    head = "thought? " if thought == "possible" else "thought "
    # Some models repeat what the prompt ends with.
    token, _ = markers.tokens
    begin = sequence(marker(token, tokens), literal(markers.begin.removeprefix(token)))
    begin = f"({begin})" + (" " if thought == "possible" else "? ")
    others = any_of(tokens, markers.end)
    if markers.end not in tokens:
        return head, [
            f"thought: {begin}{till('thinking', 'THINKING', others)} /\\n{{0,2}}/",
            f"thinking[suffix={literal(markers.end)}]: /(.|\\n)*/",
            f"THINKING: {ANYTHING} & {without(markers.end)}",
        ]
    return head, [
        f"thought: {begin}{text_with('THINKING', others)} {marker(markers.end, tokens)} /\\n{{0,2}}/",
        f"THINKING: {ANYTHING} & {without(markers.end)}",
    ]
