"""Puts our classes in the place of hypercorn's, which has no setting for them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import hypercorn.asyncio.run as runs
import hypercorn.asyncio.tcp_server as connection
import hypercorn.logging as logs
from hypercorn.config import Config
from hypercorn.logging import AccessLogAtoms

from aengine.http.hypercorn.accepted import AcceptedConnection, OpenConnections, most_connections
from aengine.http.hypercorn.http1 import Http1Protocol

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


def install() -> None:
    """Replace hypercorn's classes for all connections that this process accepts from now on."""
    connections = OpenConnections(most_connections())
    # These modules look the names up whenever they make one.
    runs.TCPServer = partial(AcceptedConnection, connections)  # type: ignore[attr-defined, assignment]
    connection.ProtocolWrapper = Http1Protocol  # type: ignore[attr-defined, assignment]
    Config.alpn_protocols = ["http/1.1"]  # else clients that speak both would choose HTTP/2 over TLS
    logs.AccessLogAtoms = EscapedAtoms  # type: ignore[misc, assignment]
