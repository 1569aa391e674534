"""Parses an answer in harmony, the format of gpt-oss, as it comes: messages in channels, some of them calls."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.formats.base import call_id
from aengine.text.answer.harmony.header import Header
from aengine.text.answer.harmony.markers import CALL, CHANNEL, CONTROL, END, MESSAGE, RETURN, START
from aengine.text.answer.json_value import JsonValue

_TOKEN = re.compile("|".join(map(re.escape, CONTROL)))
_LONGEST = max(map(len, CONTROL))
_FUNCTIONS = "functions."

Body = Literal["none", "thought", "content", "call", "dropped"]


class HarmonyParser:
    """Turns messages into thoughts (the channel `analysis`), content, and calls of `tools`, by whom they go to.

    A message to anybody else is a thought in `analysis`, and elsewhere content, with its header. Text without a header
    is content, and so is what is too long for one. Control tokens within a string of a call's arguments are text.
    Several thoughts are put together with line breaks, and so are several messages. Whatever is written there is an
    answer; it does not depend on how the text is cut, and time is linear in it.

    thoughts: tell them as such, else they are content. Without `parallel` calls behind the first one are dropped.
    """

    __slots__ = (
        "_arguments",
        "_begins",
        "_body",
        "_header",
        "_held",
        "_parallel",
        "_said",
        "_thoughts",
        "_tools",
        "calls",
    )

    def __init__(self, tools: Collection[str] = (), *, parallel: bool = True, thoughts: bool = True) -> None:
        self._tools = tools
        self._parallel = parallel
        self._thoughts = thoughts
        self.calls = 0
        self._held = ""  # the beginning of a control token, maybe
        self._header = Header()
        self._body: Body = "none"  # what is being read; none: a header
        self._said: set[Body] = set()  # what there has been some of
        self._begins = True  # nothing of the body has come
        self._arguments: JsonValue | None = None  # of the call that is being read, once they have begun

    def feed(self, text: str) -> list[Delta]:
        """Parse more text: the pieces that are complete now."""
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        at = 0
        for found in _TOKEN.finditer(text):
            self._read(text[at : found.start()], deltas)
            self._control(found[0], deltas)
            at = found.end()
        end = len(text) - _overlap(text, at)
        self._read(text[at:end], deltas)
        self._held = text[end:]
        return deltas

    def finish(self) -> list[Delta]:
        """Parse the end of the text: the pieces that were held back."""
        deltas: list[Delta] = []
        self._read(self._held, deltas)
        self._held = ""
        if self._body == "none" and self._header.begun and (text := self._header.text):
            self._begin("content")
            self._say(text, deltas)
        self._end(deltas)
        return deltas

    def _read(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if self._body != "none":
            self._say(text, deltas)
        elif not self._header.feed(text):
            self._begin("content")
            self._say(self._header.text, deltas)

    def _control(self, token: str, deltas: list[Delta]) -> None:
        if self._body == "call" and self._arguments is not None and self._arguments.quoted:
            self._say(token, deltas)
        elif token in (START, CHANNEL, END, CALL, RETURN):
            if self._body != "none" or token not in (START, CHANNEL):
                self._end(deltas)
            if token == START:
                self._header = Header(begun=False)
            elif token == CHANNEL:
                self._header.control(token)
        elif self._body == "none":
            if token == MESSAGE:
                self._begin_message(deltas)
            else:
                self._header.control(token)

    def _begin_message(self, deltas: list[Delta]) -> None:
        header = self._header
        recipient = header.recipient
        name = None if recipient is None else recipient.removeprefix(_FUNCTIONS)
        if name in self._tools:
            self._begin_call(name or "", deltas)
        elif header.channel.startswith("analysis"):
            self._begin("thought" if self._thoughts else "content")
        else:
            self._begin("content")
            if recipient is not None:
                self._say("".join(header.raw).removeprefix("assistant") + MESSAGE, deltas)

    def _begin_call(self, name: str, deltas: list[Delta]) -> None:
        if self.calls and not self._parallel:
            self._begin("dropped")
            return
        self._begin("call")
        deltas.append(CallDelta(self.calls, "", call_id(), name))
        self.calls += 1

    def _begin(self, body: Body) -> None:
        self._body, self._begins = body, True

    def _say(self, text: str, deltas: list[Delta]) -> None:
        body = self._body
        if body == "call":
            if self._arguments is None and (text := text.lstrip()):
                self._arguments = JsonValue(text[0])
            if self._arguments is not None:
                if self._arguments.read(text, 0)[1]:
                    self._arguments = JsonValue("0")  # what follows has no strings
                deltas.append(CallDelta(self.calls - 1, text))
        elif body in ("thought", "content"):
            if self._begins and body in self._said:
                text = f"\n{text}"
            self._begins = False
            self._said.add(body)
            deltas.append(ReasoningDelta(text) if body == "thought" else ContentDelta(text))

    def _end(self, deltas: list[Delta]) -> None:
        """End the body, if there is one; a header comes next."""
        if self._body == "call" and self._arguments is None:
            deltas.append(CallDelta(self.calls - 1, "{}"))
        if self._body == "none" and self._header.begun and (text := self._header.text):
            self._begin("content")
            self._say(text, deltas)
        self._body, self._arguments = "none", None
        self._header = Header()


def _overlap(text: str, at: int) -> int:
    """The number of characters at the end of the text, from a place on, that may begin a control token."""
    begin = text.rfind("<", max(at, len(text) - _LONGEST + 1))
    return len(text) - begin if begin >= 0 and any(token.startswith(text[begin:]) for token in CONTROL) else 0
