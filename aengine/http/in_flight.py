"""The requests that a server is busy with: counted, so that it can leave when they are done, or cut them off."""

from __future__ import annotations

import asyncio

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send


class InFlight:
    """Wraps the HTTP side. A request that is cut off says so to its client as in any other shutdown."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._scopes: set[anyio.CancelScope] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as cut:
            self._scopes.add(cut)
            self._idle.clear()
            try:
                await self._app(scope, receive, send)
            finally:
                self._scopes.discard(cut)
                if not self._scopes:
                    self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    def cut_off(self) -> None:
        """End every request; streams end with an error event."""
        for scope in list(self._scopes):
            scope.cancel()
