"""Builds pieces of grammars in Lark's notation, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Tokens = Mapping[str, int]  # markers that are single tokens, with their ids; these are never text

ANYTHING = "/(.|\\n)+/"

# The separators of JSON in chat templates, which models have learnt. As white space is fixed, no model can write blanks
# without end.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PLACE = "  // from "  # begins a comment that names the place in the request from which a line comes
PLACED = re.compile(rf"{_PLACE}(\S+)$", re.MULTILINE)


def literal(text: str) -> str:
    """Return a terminal of this text; an empty string for an empty text."""
    return json.dumps(text).replace("\x7f", "\\u007f") if text else ""


def marker(text: str, tokens: Tokens) -> str:
    """Return a terminal of a marker: its token if it is one, else its text."""
    return f"<[{tokens[text]}]>" if text in tokens else literal(text)


def sequence(*parts: str) -> str:
    """Return the parts in a row, without empty ones."""
    return " ".join(part for part in parts if part) or '""'


def json_value(schema: Mapping[str, Any], where: str, *, lenient: bool) -> str:
    """Return an expression for JSON that matches a schema, for the end of a line. where: see place()."""
    options = {**_JSON_OPTIONS, "lenient": lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}{place(where)}"


def place(where: str) -> str:
    """Return a comment for the end of a line: the place in the request from which the line comes, for errors."""
    return f"{_PLACE}{where}"


def any_of(tokens: Tokens, *but: str) -> str:
    """Return an expression for any one of the tokens except `but`; empty if no token is left."""
    return " | ".join(marker(token, tokens) for token in sorted(tokens) if token not in but)


def separated(rule: str, required: Sequence[bool], separator: str, further: str) -> list[str]:
    """Return rules in which `rule` describes the members `{rule}_0`, `{rule}_1`, ... in this order, with separators.

    required: for each member, whether it must be there. further: the text of the list if it has none of these members.
    """
    rules = [f"{rule}: {rule}_first_0"]
    for index, must in enumerate(required):
        one, first, more = f"{rule}_{index}", f"{rule}_first_{index + 1}", f"{rule}_more_{index + 1}"
        another = f"{separator} {one}"
        rules += [
            f"{rule}_first_{index}: {one} {more}{'' if must else f' | {first}'}",
            f"{rule}_more_{index}: {another if must else f'({another})?'} {more}",
        ]
    last = len(required)
    return [*rules, f"{rule}_first_{last}: {further}", f'{rule}_more_{last}: ""']


def text_with(terminal: str, others: str, first: str | None = None) -> str:
    """Return an expression for texts and `others`, an alternative of tokens, in any order.

    Two texts are never adjacent: together they could form a text that the terminal forbids. first: another terminal for
    the text before any token.
    """
    further = f" (({others}) {terminal}?)*" if others else ""
    return f"{first or terminal}?{further}"


def text_until(last: str, terminal: str, others: str) -> str:
    """Return an expression like text_with() that ends with a marker which is text, not a token.

    last: a rule of a text up to and including the marker.
    """
    return f"({terminal}? ({others}))* {last}" if others else last


def without(text: str) -> str:
    """Return a regular expression of texts that do not contain this text."""
    return f"~/(.|\\n)*{pattern(text)}(.|\\n)*/"


def not_beginning(*texts: str) -> str:
    """Return a regular expression of texts that begin with none of these texts, even after blanks.

    Blanks are the characters that `str.strip` removes.
    """
    return f"~/[\\s\\x1c-\\x1f]*({'|'.join(map(pattern, texts))})(.|\\n)*/"


def pattern(text: str) -> str:
    """Return a regular expression that matches this text alone."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def avoiding(text: str) -> str:
    """Return a regular expression of texts that do not contain this text. Its first character must occur only once.

    It needs no intersection, of which a grammar may have only a few.
    """
    first = f"\\x{ord(text[0]):02x}"
    begun = "|".join(pattern(text[:end]) for end in range(1, len(text)))
    broken = "|".join(f"{pattern(text[:end])}[^{first}\\x{ord(text[end]):02x}]" for end in range(1, len(text)))
    return f"([^{first}]|({begun})*({broken}))*({begun})*"
