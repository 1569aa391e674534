"""Parses what stands before a message in harmony: its channel, and to whom it goes."""

from __future__ import annotations

import re

from aengine.text.answer.harmony.markers import CHANNEL, CONSTRAIN, START

_LONGEST = 256  # characters between control tokens; what is longer is no header
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_TO = "to="


class Header:
    """A header as it comes: `role to=recipient<|channel|>channel to=recipient <|constrain|>type`.

    begun: the role has been written already, by the prompt. What then is not ` to=` is text without a header.
    """

    __slots__ = ("_field", "_length", "_texts", "begun", "raw")

    def __init__(self, begun: bool = True) -> None:
        self.begun = begun
        self.raw: list[str] = []  # all that has been written, the role's token left out
        self._texts: dict[str, list[str]] = {START: [], CHANNEL: [], CONSTRAIN: []}
        self._field = START  # the token behind which text stands now
        self._length = 0

    def control(self, token: str) -> None:
        """Take a control token that stands in a header."""
        self.raw.append(token)
        self.begun = False
        if token in (CHANNEL, CONSTRAIN):
            self._field = token
            self._texts[token].clear()

    def feed(self, text: str) -> bool:
        """Take text. False: it and what came before it is no header."""
        self.raw.append(text)
        self._length += len(text)
        self._texts[self._field].append(text)
        if self._length > _LONGEST:
            return False
        if not self.begun:
            return True
        said = "".join(self._texts[START]).lstrip()
        return _TO.startswith(said) or said.startswith(_TO)

    @property
    def text(self) -> str:
        """What has been written, without control tokens."""
        return "".join(piece for texts in self._texts.values() for piece in texts)

    @property
    def channel(self) -> str:
        """The channel's name; empty where none is written."""
        return (self._text(CHANNEL).split() or [""])[0]

    @property
    def recipient(self) -> str | None:
        """To whom the message goes; None: to the user."""
        found = _RECIPIENT.search(self._text(CHANNEL)) or _RECIPIENT.search(self._text(START))
        return None if found is None else found[1]

    def _text(self, field: str) -> str:
        return "".join(self._texts[field])
