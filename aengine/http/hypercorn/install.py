"""Puts our classes in the place of hypercorn's, which has no setting for them, in every way of starting it."""

from __future__ import annotations

from functools import partial

import hypercorn.asyncio.run as runs
import hypercorn.logging as logs
import hypercorn.protocol as protocols

from aengine.http.door.turnstile import Turnstile
from aengine.http.hypercorn.accepted import AcceptedConnection, OpenConnections, most_connections
from aengine.http.hypercorn.access_log import EscapedAtoms
from aengine.http.hypercorn.http2 import BoundedH2


def install() -> None:
    """Replace hypercorn's classes for all connections that this process accepts from now on."""
    connections, turns = OpenConnections(most_connections()), Turnstile(per_pass=1)
    # These modules look the names up whenever they make one.
    runs.TCPServer = partial(AcceptedConnection, connections)  # type: ignore[attr-defined, assignment]
    protocols.H2Protocol = partial(BoundedH2, turns)  # type: ignore[attr-defined, assignment]
    logs.AccessLogAtoms = EscapedAtoms  # type: ignore[misc, assignment]
