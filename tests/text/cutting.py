"""Cuts texts into fragments, and collects what parsers make of them."""

from __future__ import annotations

from typing import Protocol

from hypothesis import strategies as st

from aengine.text.answer.deltas import Answer, Delta, join_deltas
from aengine.text.answer.reader import Reader
from aengine.types import Fragment


class Parser(Protocol):
    def feed(self, text: str) -> list[Delta]: ...
    def finish(self, cut: bool = False) -> list[Delta]: ...


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    """Every way to cut a text into fragments, also empty ones."""
    places = st.lists(st.integers(0, len(text)), max_size=12).map(sorted)
    return places.map(lambda at: [text[i:j] for i, j in zip([0, *at], [*at, len(text)])])


def told(parser: Parser, fragments: list[str]) -> list[Delta]:
    deltas = [delta for fragment in fragments for delta in parser.feed(fragment)]
    return deltas + parser.finish()


def answer(parser: Parser, *fragments: str) -> Answer:
    return join_deltas(told(parser, list(fragments)))


def shape(found: Answer) -> tuple[str, str, list[tuple[str, str]]]:
    """Return an answer without the random ids of its calls."""
    return found.reasoning, found.content, [(call.name, call.arguments) for call in found.calls]


def read(parser: Parser, text: str, cut: bool = False) -> Answer:
    """Parse a whole answer in pieces: the text after a marker is copied, so time is linear in small pieces only."""
    deltas = [delta for at in range(0, len(text), 4096) for delta in parser.feed(text[at : at + 4096])]
    return join_deltas(deltas + parser.finish(cut))


def read_fragments(reader: Reader, *texts: str) -> Answer:
    """Read a whole choice, fragment by fragment."""
    deltas = [delta for text in texts for delta in reader.feed(Fragment(text))]
    return join_deltas(deltas + reader.feed(Fragment("", finish_reason="stop")))
