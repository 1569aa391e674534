"""The requests that a server is busy with: counted, so that it can leave when they are done, or cut them off."""

from __future__ import annotations

import asyncio

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.errors import EngineClosedError
from aengine.http.errors import error_response

_LAST_WORDS = 1.0  # seconds


class InFlight:
    """Wraps the HTTP side. A request that is cut off before its answer began is answered here: 503."""

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
                await self._answer(scope, receive, send)
            finally:
                self._scopes.discard(cut)
                if not self._scopes:
                    self._idle.set()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except anyio.get_cancelled_exc_class():
            if not begun:  # its body was still on its way, or its prompt was being read
                closed = error_response(EngineClosedError("the server is shutting down"), {"Connection": "close"})
                with anyio.move_on_after(_LAST_WORDS, shield=True):
                    await closed(scope, receive, send)
            raise

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    def cut_off(self) -> None:
        """End every request; streams end with an error event."""
        for scope in list(self._scopes):
            scope.cancel()
