"""Keeps a server's shutdown from waiting for connections that are still open, and from reporting those it cuts off."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any


def wait_for_no_client(loop: asyncio.AbstractEventLoop) -> None:
    """Replace `wait_closed` of the servers that this loop makes from now on, which return at once, as before 3.12.1.

    Since then it waits for every connection, and hypercorn, which cuts connections off only after it, would stay for as
    long as a stream runs, and for ever with a client that does not read.
    """
    create = loop.create_server

    async def create_server(*args: Any, **options: Any) -> asyncio.Server:
        server = await create(*args, **options)
        with suppress(AttributeError):  # uvloop's servers cannot be changed, and do not need to be
            server.wait_closed = _at_once  # type: ignore[method-assign]  # of this one server
        return server

    with suppress(AttributeError):
        loop.create_server = create_server  # type: ignore[method-assign]  # of this one loop


async def _at_once() -> None:
    await asyncio.sleep(0)


def report_no_cut_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Wrap the loop's exception handler, so that it hears of no connection that was cut off, by hypercorn or in the
    middle of HTTPS: asyncio's streams (3.11) stumble over them.
    """
    report = loop.get_exception_handler() or (lambda loop, context: loop.default_exception_handler(context))

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), asyncio.CancelledError | ssl.SSLError):
            report(loop, context)

    loop.set_exception_handler(handle)
