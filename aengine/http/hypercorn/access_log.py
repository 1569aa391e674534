"""Escapes control characters in the access log's fields, so that a client cannot forge a line."""

from __future__ import annotations

import re
from typing import Any

from hypercorn.logging import AccessLogAtoms

_CONTROL = re.compile(r'[\x00-\x1f"\\\x7f-\x9f\u2028\u2029]')


class EscapedAtoms(AccessLogAtoms):
    """hypercorn's fields of the access log, escaped, and with the protocol in full: `GET / HTTP/1.1`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        version = self["H"]
        self["H"] = f"HTTP/{version}"
        for line in ("r", "R"):  # which end in it
            self[line] = self[line].removesuffix(version) + self["H"]
        for name, value in self.items():
            if isinstance(value, str):
                self[name] = _CONTROL.sub(_escape, value)


def _escape(found: re.Match[str]) -> str:
    return "\\" + found[0] if found[0] in '"\\' else found[0].encode("unicode_escape").decode()
