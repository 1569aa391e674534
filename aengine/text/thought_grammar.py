"""A thought before an answer that has a grammar, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Collection

from aengine.structured import Thought
from aengine.text.reasoning import THOUGHT_BEGIN, THOUGHT_END


def thought_rules(thought: Thought, special_tokens: Collection[str]) -> tuple[str, list[str]]:
    """What a start rule begins with, and the rules that this refers to.

    special_tokens: those markers that the tokenizer holds as special tokens, which are no text. After the thought up to
    two line breaks may follow.
    """
    if thought == "never":
        return "", []
    head = "thought? " if thought == "possible" else "thought "
    # Some models repeat what the prompt ends with.
    begin = marker(THOUGHT_BEGIN, special_tokens) + (" " if thought == "possible" else "? ")
    # Special tokens are no part of a text; written out, the marker is where the text ends.
    if THOUGHT_END in special_tokens:
        return head, [f"thought: {begin}/(.|\\n)*/ {THOUGHT_END} /\\n{{0,2}}/"]
    return head, [
        f"thought: {begin}thinking /\\n{{0,2}}/",
        f"thinking[suffix={json.dumps(THOUGHT_END)}]: /(.|\\n)*/",
    ]


def marker(text: str, special_tokens: Collection[str]) -> str:
    """A marker as a grammar names it."""
    return text if text in special_tokens else json.dumps(text)
