"""Builds pieces of grammars in Lark's notation, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Tokens = Mapping[str, int]  # markers that are tokens of their own, with their ids; as such they are no text

ANYTHING = "/(.|\\n)+/"

# JSON as chat templates write it and models learn it. Without free white space no answer can end in endless blanks.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PLACE = "  // from "  # before a comment that says where in the request a line comes from
PLACED = re.compile(rf"{_PLACE}(\S+)$", re.MULTILINE)


def literal(text: str) -> str:
    """A terminal of a text as it is; an empty one is left away."""
    return json.dumps(text).replace("\x7f", "\\u007f") if text else ""


def marker(text: str, tokens: Tokens) -> str:
    """A terminal of a marker: its token, or its text."""
    return f"<[{tokens[text]}]>" if text in tokens else literal(text)


def sequence(*parts: str) -> str:
    """Parts in a row, empty ones left away."""
    return " ".join(part for part in parts if part) or '""'


def json_value(schema: Mapping[str, Any], where: str, *, lenient: bool) -> str:
    """JSON of a schema, at the end of a line. where: its place in the request, for errors."""
    options = {**_JSON_OPTIONS, "lenient": lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}{place(where)}"


def place(where: str) -> str:
    """A comment at the end of a line: where in the request it comes from."""
    return f"{_PLACE}{where}"


def any_of(tokens: Tokens, *but: str) -> str:
    """One of the tokens but these, as an alternative; empty where there is none."""
    return " | ".join(marker(token, tokens) for token in sorted(tokens) if token not in but)


def text_with(terminal: str, others: str, first: str | None = None) -> str:
    """A text and other tokens in any order. Two texts never meet, or they could be one that the terminal forbids.

    first: another terminal for the text before any token.
    """
    further = f" (({others}) {terminal}?)*" if others else ""
    return f"{first or terminal}?{further}"


def till(last: str, terminal: str, others: str) -> str:
    """The same, and at its end `last`, a text up to a marker that is text as well, with it."""
    return f"({terminal}? ({others}))* {last}" if others else last


def without(text: str) -> str:
    """A regular expression of texts that do not contain a text."""
    return f"~/(.|\\n)*{pattern(text)}(.|\\n)*/"


def not_beginning(text: str) -> str:
    """A regular expression of texts that do not begin with a text, blanks before it (as Python strips them) or not."""
    return f"~/[\\s\\x1c-\\x1f]*{pattern(text)}(.|\\n)*/"


def pattern(text: str) -> str:
    """A regular expression that matches a text alone."""
    return re.escape(text).replace("/", "\\/")


def avoiding(text: str) -> str:
    """A regular expression of texts that do not contain this one, whose first character occurs in it but once.

    Without an intersection, of which a grammar may have only a few.
    """
    first = f"\\x{ord(text[0]):02x}"
    begun = "|".join(pattern(text[:end]) for end in range(1, len(text)))
    broken = "|".join(f"{pattern(text[:end])}[^{first}\\x{ord(text[end]):02x}]" for end in range(1, len(text)))
    return f"([^{first}]|({begun})*({broken}))*({begun})*"
