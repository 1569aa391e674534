"""The part of a reader of one call that is the same in every format: pieces, the text before it is one, arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod


class PartialCall(ABC):
    """Parses the text of one call, given in any pieces, as `CallReader` has it. A format says what a character is."""

    __slots__ = ("_arguments", "broken", "done", "id", "name", "raw")

    def __init__(self) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.done = False
        self.broken = False
        self.raw: list[str] = []
        self._arguments: list[str] = []  # not taken yet

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether the text is a call; it stays one from then on."""

    @abstractmethod
    def _read(self, text: str, at: int) -> int:
        """Parse some of the text from `at` on, or say that it is done or broken; returns where it goes on."""

    def feed(self, text: str) -> int:
        """As `CallReader`."""
        at = 0
        while at < len(text) and not self.done and not self.broken:
            at = self._read(text, at)
        if not self.begun:
            self.raw.append(text[:at])
        return at

    def take_arguments(self) -> str:
        """As `CallReader`."""
        if not self.begun:
            return ""
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments
