"""Answers in harmony, the format of gpt-oss: messages in channels, some of which are calls."""

from __future__ import annotations

import json
import re
from typing import Literal

from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.formats.base import Tools, call_id
from aengine.text.answer.formats.values.json_arguments import JsonArguments
from aengine.text.answer.formats.values.schemas import parameters_of
from aengine.text.answer.thought import ThoughtMarkers

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
CONTROL = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
STOPS = (CALL, RETURN)  # each ends an answer

# The markers around the thought at the beginning of an answer.
HARMONY_THOUGHT = ThoughtMarkers(f"{CHANNEL}analysis{MESSAGE}", END)
FURTHER_THOUGHT = f"{START}assistant{HARMONY_THOUGHT.begin}"  # begins another thought after the first one


def uses_harmony(template: str) -> bool:
    """Return whether a chat template writes messages with channels."""
    return all(token in template for token in (START, CHANNEL, MESSAGE)) and "analysis" in template


_LONGEST_HEADER = 256  # characters between control tokens; a longer text is no header
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_TO = "to="


class Header:
    """A header as it comes: `role to=recipient<|channel|>channel to=recipient <|constrain|>type`.

    begun: the prompt has written the role already. Then text that does not begin with ` to=` has no header.
    """

    __slots__ = ("_field", "_length", "_texts", "begun", "raw")

    def __init__(self, begun: bool = True) -> None:
        self.begun = begun
        self.raw: list[str] = []  # the whole header so far, without the token of the role
        self._texts: dict[str, list[str]] = {START: [], CHANNEL: [], CONSTRAIN: []}
        self._field = START  # the token before the current text
        self._length = 0

    def control(self, token: str) -> None:
        """Feed a control token of a header."""
        self.raw.append(token)
        self.begun = False
        if token in (CHANNEL, CONSTRAIN):
            self._field = token
            self._texts[token].clear()

    def feed(self, text: str) -> bool:
        """Feed text. Returns False if it and the text before it are no header."""
        self.raw.append(text)
        self._length += len(text)
        self._texts[self._field].append(text)
        if self._length > _LONGEST_HEADER:
            return False
        if not self.begun:
            return True
        said = "".join(self._texts[START]).lstrip()
        return _TO.startswith(said) or said.startswith(_TO)

    @property
    def text(self) -> str:
        """The header without its control tokens."""
        return "".join(piece for texts in self._texts.values() for piece in texts)

    @property
    def channel(self) -> str:
        """The channel's name; empty if the header has none."""
        return (self._text(CHANNEL).split() or [""])[0]

    @property
    def recipient(self) -> str | None:
        """The recipient of the message; None for the user."""
        found = _RECIPIENT.search(self._text(CHANNEL)) or _RECIPIENT.search(self._text(START))
        return None if found is None else found[1]

    def _text(self, field: str) -> str:
        return "".join(self._texts[field])


_TOKEN = re.compile("|".join(map(re.escape, CONTROL)))
_LONGEST_TOKEN = max(map(len, CONTROL))
_FUNCTIONS = "functions."

Body = Literal["none", "thought", "content", "call", "dropped"]


class HarmonyParser:
    """Separates messages into thoughts (the channel `analysis`), content, and calls of `tools`, by their recipients.

    A message to another recipient is a thought in `analysis`; in other channels it is content, together with its
    header. Text without a header is content, and so is a header that is too long. Control tokens inside a string of a
    call's arguments are text. Arguments that are not JSON, for example a program or a patch, become an object with that
    text. Several thoughts are joined with line breaks, and so are several messages. The parser accepts any text. The
    result does not depend on how the text is cut, and time is linear in it.

    thoughts: report thoughts as such; else they are content. parallel: if False, calls after the first one are dropped.
    """

    __slots__ = (
        "_arguments",
        "_begins",
        "_body",
        "_header",
        "_held",
        "_is_text",
        "_name",
        "_parallel",
        "_seen",
        "_thoughts",
        "_tools",
        "_unread",
        "calls",
        "cut",
    )

    def __init__(self, tools: Tools | None = None, *, parallel: bool = True, thoughts: bool = True) -> None:
        self._tools = tools or {}
        self._parallel = parallel
        self._thoughts = thoughts
        self.calls = 0
        self.cut = False  # whether the last call's arguments are cut off
        self._held = ""  # text that may become a control token
        self._header = Header()
        self._body: Body = "none"  # the kind of body that is being read; "none" for a header
        self._seen: set[Body] = set()  # the kinds of bodies that had any text
        self._begins = True  # whether no text of the body has come
        self._name = ""  # of the call that is being read
        self._arguments = JsonArguments()  # of that call
        self._unread: list[str] = []  # text of the arguments that may not be JSON
        self._is_text = False  # whether the arguments are not JSON

    def feed(self, text: str) -> list[Delta]:
        """Parse more text. Returns the deltas that are complete now."""
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

    def finish(self, cut: bool = False) -> list[Delta]:
        """Parse the end of the text. Returns the deltas that were held back. cut: the model would have continued."""
        deltas: list[Delta] = []
        self._read(self._held, deltas)
        self._held = ""
        self._end(deltas, cut)
        return deltas

    def _read(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if self._body != "none":
            self._add_text(text, deltas)
        elif not self._header.feed(text):
            self._begin("content")
            self._add_text(self._header.text, deltas)

    def _control(self, token: str, deltas: list[Delta]) -> None:
        if self._body == "call" and self._arguments.quoted:
            self._add_text(token, deltas)
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
                self._add_text("".join(header.raw).removeprefix("assistant") + MESSAGE, deltas)

    def _begin_call(self, name: str, deltas: list[Delta]) -> None:
        if self.calls and not self._parallel:
            self._begin("dropped")
            return
        self._begin("call")
        self._name, self._arguments, self._is_text = name, JsonArguments(), False
        deltas.append(CallDelta(self.calls, "", call_id(), name))
        self.calls += 1

    def _begin(self, body: Body) -> None:
        self._body, self._begins = body, True

    def _add_text(self, text: str, deltas: list[Delta]) -> None:
        body = self._body
        if body == "call":
            self._add_arguments(text, deltas)
        elif body in ("thought", "content"):
            if not text:
                return
            if self._begins and body in self._seen:
                text = f"\n{text}"
            self._begins = False
            self._seen.add(body)
            deltas.append(ReasoningDelta(text) if body == "thought" else ContentDelta(text))

    def _add_arguments(self, text: str, deltas: list[Delta]) -> None:
        if self._is_text:
            self._report_arguments(json.dumps(text, ensure_ascii=False)[1:-1], deltas)
            return
        if not self._arguments.begun:
            self._unread.append(text)
        self._arguments.feed(text)
        if self._arguments.begun:
            self._unread.clear()
            self._report_arguments(self._arguments.take(), deltas)
        elif self._arguments.broken:
            self._begin_text(deltas)

    def _begin_text(self, deltas: list[Delta]) -> None:
        """Report arguments that are not JSON as the text of the tool's parameter."""
        parameters = parameters_of(self._tools[self._name])
        key = parameters[0].name if len(parameters) == 1 else "input"
        self._is_text = True
        self._report_arguments(f'{{{json.dumps(key, ensure_ascii=False)}: "', deltas)
        text = "".join(self._unread)
        self._unread.clear()
        self._add_arguments(text, deltas)

    def _end_arguments(self, deltas: list[Delta]) -> None:
        self._arguments.end()
        if not self._is_text and not self._arguments.begun and "".join(self._unread).strip():
            self._begin_text(deltas)
        if self._is_text:
            self._report_arguments('"}', deltas)
        elif self._arguments.begun:
            self._arguments.close()
            self._report_arguments(self._arguments.take(), deltas)
        else:
            self._report_arguments("{}", deltas)

    def _report_arguments(self, arguments: str, deltas: list[Delta]) -> None:
        if arguments:
            deltas.append(CallDelta(self.calls - 1, arguments))

    def _end(self, deltas: list[Delta], cut: bool = False) -> None:
        """End the current body, if there is one. A header comes next."""
        if self._body == "call":
            self.cut = cut and not self._arguments.done
            if not self.cut:
                self._end_arguments(deltas)
        elif self._body == "none" and self._header.begun and not (cut and self._header.recipient):
            self._begin("content")
            self._add_text(self._header.text, deltas)
        self._unread.clear()
        self._body = "none"
        self._header = Header()


def _overlap(text: str, at: int) -> int:
    """Return how many characters at the end of `text[at:]` may begin a control token."""
    begin = text.rfind("<", max(at, len(text) - _LONGEST_TOKEN + 1))
    return len(text) - begin if begin >= 0 and any(token.startswith(text[begin:]) for token in CONTROL) else 0
