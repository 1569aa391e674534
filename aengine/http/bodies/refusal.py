"""The refusal of a field, by name and with a remedy."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from aengine.errors import InvalidRequestError


class Unsupported(NamedTuple):
    """The reason or the alternative for a refused field, and the values besides null that ask for nothing."""

    remedy: str
    harmless: tuple[Any, ...] = ()

    def check(self, name: str, value: msgspec.Raw) -> None:
        given = msgspec.json.decode(value)
        if given is not None and given not in self.harmless:
            raise InvalidRequestError(f"{name}: {self.remedy}", name)
