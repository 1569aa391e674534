"""The common part of readers of one call: feeding pieces, the text before the call begins, arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod

from aengine.text.answer.formats.values.json_arguments import JsonArguments


class PartialCall(ABC):
    """Parses the text of one call, given in any pieces; implements `CallReader` except for the format's own syntax."""

    __slots__ = ("_arguments", "broken", "done", "id", "left", "name", "raw")

    def __init__(self) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.done = False
        self.broken = False
        self.raw: list[str] = []
        self.left = ""
        self._arguments: list[str] = []  # pieces that have not been taken

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether the text is a call; it stays one from then on."""

    def _break(self, tag: str) -> None:
        """End the call: the next character cannot be part of it, nor can `tag`, which might have become a tag."""
        self.broken = True
        self.left = tag if self.begun else ""

    @abstractmethod
    def _close(self) -> None:
        """Write the end of arguments that have begun, so that they are JSON in any case."""

    @abstractmethod
    def _read(self, text: str, at: int) -> int:
        """Parse some of `text[at:]`, or set `done` or `broken`. Returns where to continue."""

    def feed(self, text: str) -> int:
        """See `CallReader`."""
        at = 0
        while at < len(text) and not self.done and not self.broken:
            at = self._read(text, at)
        if not self.begun:
            self.raw.append(text[:at])
        elif self.done or self.broken:
            self._close()
        return at

    def settle(self) -> str:
        """See `CallReader`."""
        return ""

    def close(self) -> None:
        """See `CallReader`."""
        if self.begun and not self.done and not self.broken:
            self.broken = True
            self._close()

    def take_arguments(self) -> str:
        """See `CallReader`."""
        if not self.begun:
            return ""
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments


class JsonPartialCall(PartialCall):
    """A call whose arguments are one JSON object. A format finds the name, and the place where the arguments begin."""

    __slots__ = ("_json",)

    def __init__(self, tags: tuple[str, ...]) -> None:
        """tags: the markers in and around the call, which end a string without its quote."""
        super().__init__()
        self._json = JsonArguments(tags)

    def settle(self) -> str:
        """See `CallReader`."""
        left = self._json.settle()
        self.broken = self.broken or bool(left)
        return left if self.begun else ""

    def _read_arguments(self, text: str, at: int) -> int:
        """Parse more of the arguments. The call is broken if they are. Returns where their part of the text ends."""
        at = self._json.feed(text, at)
        if self._json.begun:
            self._arguments.append(self._json.take())
        if self._json.broken:
            self._break(self._json.left)
        return at

    def _close(self) -> None:
        self._json.close()
        self._arguments.append(self._json.take())
