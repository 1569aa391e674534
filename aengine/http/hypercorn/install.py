"""Puts our classes in the place of hypercorn's, which has no setting for them, in every way of starting it."""

from __future__ import annotations

from functools import partial

import hypercorn.asyncio.run as runs
import hypercorn.asyncio.tcp_server as connection
import hypercorn.logging as logs
from hypercorn.config import Config

from aengine.http.hypercorn.accepted import AcceptedConnection, OpenConnections, most_connections
from aengine.http.hypercorn.access_log import EscapedAtoms
from aengine.http.hypercorn.http1 import Http1Protocol


def install() -> None:
    """Replace hypercorn's classes for all connections that this process accepts from now on."""
    connections = OpenConnections(most_connections())
    # These modules look the names up whenever they make one.
    runs.TCPServer = partial(AcceptedConnection, connections)  # type: ignore[attr-defined, assignment]
    connection.ProtocolWrapper = Http1Protocol  # type: ignore[attr-defined, assignment]
    Config.alpn_protocols = ["http/1.1"]  # else clients that speak both would choose HTTP/2 over TLS
    logs.AccessLogAtoms = EscapedAtoms  # type: ignore[misc, assignment]
