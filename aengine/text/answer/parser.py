"""Detects how a model writes its answers, and parses one: thought, content, calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from aengine.config import CallFormatName
from aengine.prompt_images import PromptImages
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.formats.base import CallFormat
from aengine.text.answer.formats.table import FORMATS, call_format_of
from aengine.text.answer.harmony import CONTROL, HARMONY_THOUGHT, HarmonyParser, uses_harmony
from aengine.text.answer.thought import ALL_THOUGHTS, THINK, ThoughtMarkers, ThoughtParser, thoughts_of
from aengine.text.answer.unclosed_thought import UnclosedThought

_MARKERS = (
    *(marker for markers in ALL_THOUGHTS for marker in markers.tokens),
    *(marker for form in FORMATS.values() for marker in form.syntax.markers),
)


class AnswerFormat(msgspec.Struct, frozen=True):
    """How a checkpoint writes its answers, by its chat template and vocabulary."""

    harmony: bool = False  # thoughts, calls and content are messages in channels
    calls: CallFormatName | None = None
    unknown_calls: bool = False  # the template offers tools to the model, but in no known call format
    thoughts: bool = False
    thought_markers: ThoughtMarkers = THINK
    markers: Mapping[str, int] = {}  # the markers that are single tokens, with their ids
    special_markers: frozenset[str] = frozenset()  # the markers that are hidden with the special tokens
    sees_tools: bool = True  # the template has a place for tools
    thinking_is_opt_in: bool = False  # the model thinks only if a request sets the template's `enable_thinking`

    def may_think(self, enable_thinking: object) -> bool:
        """Return whether the answer may have a thought. enable_thinking: the request's variable for the template, or
        None.
        """
        return not self.thinking_is_opt_in if enable_thinking is None else bool(enable_thinking)

    def shown_special_ids(self, thoughts: bool, calls: CallFormat | None) -> tuple[int, ...]:
        """Return the ids of special tokens that must be written as text, so that thoughts and calls are found in it."""
        looked_for = set(CONTROL) if self.harmony else set(self.thought_markers.tokens) if thoughts else set()
        if calls is not None:
            looked_for |= set(calls.syntax.markers)
        return tuple(sorted(self.markers[marker] for marker in self.special_markers & looked_for))


def answer_format_of(
    templates: Iterable[str], token_id: Callable[[str], int | None], special_ids: frozenset[int]
) -> AnswerFormat:
    """Detect the format. templates: the chat templates. token_id: returns a token's id, or None for other texts."""
    templates = list(templates)

    def tokens_of(texts: Iterable[str]) -> dict[str, int]:
        return {text: found for text in texts if (found := token_id(text)) is not None}

    if any(map(uses_harmony, templates)):
        markers = tokens_of(CONTROL)
        special = frozenset(token for token, found in markers.items() if found in special_ids)
        return AnswerFormat(
            harmony=True, thoughts=True, thought_markers=HARMONY_THOUGHT, markers=markers, special_markers=special
        )
    markers = tokens_of(_MARKERS)
    thoughts = thoughts_of(templates, markers)
    return AnswerFormat(
        calls=call_format_of(templates),
        thoughts=thoughts is not None,
        thought_markers=thoughts or THINK,
        markers=markers,
        special_markers=frozenset(marker for marker, found in markers.items() if found in special_ids),
    )


class ChatPrompt(NamedTuple):
    """A rendered and tokenized chat."""

    token_ids: list[int]
    opens_thought: bool  # whether the answer begins within a thought
    images: PromptImages | None = None  # among the tokens


class AnswerParser:
    """Parses one answer as it comes. Parts whose parser is None are not searched for.

    calls_begin: for structured output, the marker with which calls must begin directly after the thought. Elsewhere it
    is text. harmony: parses all parts, in place of the other parsers. unclosed: finds the calls in a thought that never
    ends.
    """

    __slots__ = ("_blanks", "_calls", "_calls_begin", "_edge", "_harmony", "_thoughts", "_unclosed", "plain")

    def __init__(
        self,
        thoughts: ThoughtParser | None = None,
        calls: ToolCallParser | None = None,
        *,
        calls_begin: str | None = None,
        harmony: HarmonyParser | None = None,
        unclosed: UnclosedThought | None = None,
    ) -> None:
        self._harmony = harmony
        self._thoughts = thoughts
        self._calls = calls
        self._calls_begin = calls_begin
        self._unclosed = unclosed
        self._blanks: list[str] = []  # content before any other character, while `calls_begin` may follow
        self._edge = ""  # content that may become `calls_begin`
        self.plain = thoughts is None and calls is None and harmony is None  # all further text is content as it comes

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return any(parser is not None and parser.calls > 0 for parser in (self._calls, self._harmony))

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls, and none of them was cut off."""
        return self.has_calls and not any(parser is not None and parser.cut for parser in (self._calls, self._harmony))

    def feed(self, text: str) -> list[Delta]:
        """Parse more text. Returns the deltas that are complete now."""
        if self._harmony is not None:
            return self._harmony.feed(text)
        deltas: list[Delta] = [ContentDelta(text)] if text else []
        if self._thoughts is not None:
            deltas = self._within_thought(self._thoughts.feed(text), self._thoughts.closed)
        deltas = self._with_calls(deltas)
        if self._calls is None:
            self.plain = self._thoughts is None or self._thoughts.over
        return deltas

    def finish(self, cut: bool = False) -> list[Delta]:
        """Parse the end of the text. Returns the deltas that were held back. cut: the model would have continued."""
        if self._harmony is not None:
            return self._harmony.finish(cut)
        deltas: list[Delta] = []
        if self._thoughts is not None:
            deltas = self._within_thought(self._thoughts.finish(), self._thoughts.closed)
        deltas = self._with_calls(deltas)
        if edge := "".join(self._blanks) + self._edge:
            deltas.append(ContentDelta(edge))
        if self._unclosed is not None:
            deltas += self._unclosed.finish(cut)
            if not cut and self._unclosed.calls.calls:
                self._calls = self._unclosed.calls
                return deltas
        return deltas + ([] if self._calls is None else self._calls.finish(cut))

    def _within_thought(self, deltas: list[Delta], closed: bool) -> list[Delta]:
        """Hold back the thought from its first call on. If the thought closes, the call is part of it."""
        if self._unclosed is None:
            return deltas
        found: list[Delta] = []
        answer: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                found += self._unclosed.feed(delta.text)
            else:
                answer.append(delta)
        if closed or answer:
            found += self._unclosed.close()
            self._unclosed = None
        return found + answer

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        if self._calls is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            found += self._read_content(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return found

    def _read_content(self, text: str) -> list[Delta]:
        if self._calls_begin is not None:
            text = self._edge + text
            begun = text.lstrip()
            self._blanks.append(text[: len(text) - len(begun)])
            if self._calls_begin.startswith(begun) and begun != self._calls_begin:
                self._edge = begun
                return []
            text = "".join(self._blanks) + begun
            self._edge = ""
            self._blanks.clear()
            if not begun.startswith(self._calls_begin):
                self._calls = None
            self._calls_begin = None
        return [ContentDelta(text)] if self._calls is None else self._calls.feed(text)
