"""Replaces classes of hypercorn by ours, and changes how asyncio and hypercorn stop a server."""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import suppress
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
    """hypercorn's fields of the access log, escaped, and with the full protocol name: `GET / HTTP/1.1`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        version = self["H"]
        self["H"] = f"HTTP/{version}"
        for line in ("r", "R"):  # both end with the version
            self[line] = self[line].removesuffix(version) + self["H"]
        for name, value in self.items():
            if isinstance(value, str):
                self[name] = _CONTROL.sub(_escape, value)


def _escape(found: re.Match[str]) -> str:
    return "\\" + found[0] if found[0] in '"\\' else found[0].encode("unicode_escape").decode()


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Replace hypercorn's classes for all connections that this process accepts from now on, and change its loop."""
    connections = OpenConnections(most_connections())
    # hypercorn looks up these names each time it creates an object.
    runs.TCPServer = partial(AcceptedConnection, connections)  # type: ignore[attr-defined, assignment]
    connection.ProtocolWrapper = Http1Protocol  # type: ignore[attr-defined, assignment]
    Config.alpn_protocols = ["http/1.1"]  # else clients with both would choose HTTP/2 over TLS
    logs.AccessLogAtoms = EscapedAtoms  # type: ignore[misc, assignment]
    _wait_for_no_client(loop)
    _report_no_cut_connections(loop)


def _wait_for_no_client(loop: asyncio.AbstractEventLoop) -> None:
    """Make `wait_closed` of this loop's servers return at once, as it did before Python 3.12.1.

    Since then it waits for every connection. hypercorn closes connections only afterwards, so a shutdown would last as
    long as the longest stream, and for ever with a client that does not read.
    """
    create = loop.create_server

    async def create_server(*args: Any, **options: Any) -> asyncio.Server:
        server = await create(*args, **options)
        with suppress(AttributeError):  # uvloop's servers do not allow it and do not need it
            server.wait_closed = _at_once  # type: ignore[method-assign]  # of this one server
        return server

    with suppress(AttributeError):
        loop.create_server = create_server  # type: ignore[method-assign]  # of this one loop


async def _at_once() -> None:
    await asyncio.sleep(0)


def _report_no_cut_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Wrap the loop's exception handler so that it ignores connections that were cut off.

    asyncio's streams (Python 3.11) report errors for them, whether hypercorn or the client closed them.
    """
    report = loop.get_exception_handler() or (lambda loop, context: loop.default_exception_handler(context))

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), asyncio.CancelledError | ssl.SSLError):
            report(loop, context)

    loop.set_exception_handler(handle)
