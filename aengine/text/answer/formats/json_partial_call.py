"""The part of a reader that is the same in formats whose calls have their arguments as one JSON object."""

from __future__ import annotations

from aengine.text.answer.formats.partial_call import PartialCall
from aengine.text.answer.formats.values.json_arguments import JsonArguments


class JsonPartialCall(PartialCall):
    """Ends the arguments of a call. A format finds the name, and the place where the arguments begin."""

    __slots__ = ("_json",)

    def __init__(self, tags: tuple[str, ...]) -> None:
        """tags: the markers of the call and around it, which end a string that is not closed."""
        super().__init__()
        self._json = JsonArguments(tags)

    def settle(self) -> str:
        """As `CallReader`."""
        left = self._json.settle()
        self.broken = self.broken or bool(left)
        return left if self.begun else ""

    def _close(self) -> None:
        self._json.close()
        self._arguments.append(self._json.take())
