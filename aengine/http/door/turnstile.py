"""Admits a burst of requests a few at a time, so that it never holds up running steps."""

from __future__ import annotations

import asyncio
from collections import deque

PER_PASS = 8  # some tenths of a millisecond each, to be parsed and enqueued


class Turnstile:
    """Lets `per_pass` tasks through in each pass of the event loop, in the order in which they came."""

    def __init__(self, per_pass: int = PER_PASS) -> None:
        self._per_pass = per_pass
        self._entered = 0  # in this pass
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for the caller's turn: none, unless others came in the same pass of the loop."""
        loop = asyncio.get_running_loop()
        if self._entered == self._per_pass or self._waiting:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        if not self._entered:
            loop.call_soon(self._next_pass)
        self._entered += 1

    def _next_pass(self) -> None:
        self._entered = 0
        while self._waiting and self._entered < self._per_pass:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._entered += 1
        if self._entered:
            asyncio.get_running_loop().call_soon(self._next_pass)
