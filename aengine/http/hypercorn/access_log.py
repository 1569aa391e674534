"""Fields of the access log that cannot forge a line: control characters of what the client sent are escaped."""

from __future__ import annotations

import re
from typing import Any

from hypercorn.logging import AccessLogAtoms

_CONTROL = re.compile(r'[\x00-\x1f"\\\x7f-\x9f\u2028\u2029]')


class EscapedAtoms(AccessLogAtoms):
    """hypercorn's, and with the protocol in full: `GET / HTTP/1.1`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        version = self["H"]
        self["H"] = protocol = version if version == "ws" else f"HTTP/{version}"
        self["r"], self["R"] = f"{self['m']} {self['U']} {protocol}", f"{self['m']} {self['Uq']} {protocol}"

    def __getitem__(self, key: str) -> str:
        value = super().__getitem__(key)
        return _CONTROL.sub(_escape, value) if isinstance(value, str) else value


def _escape(found: re.Match[str]) -> str:
    return "\\" + found[0] if found[0] in '"\\' else found[0].encode("unicode_escape").decode()
