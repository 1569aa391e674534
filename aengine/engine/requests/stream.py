"""The mailbox between the step loop and one request's consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aengine.types import Fragment


class Stream:
    """The fragments of one request, in order. One consumer takes; the engine puts.

    A deque and one future per request: a token costs an append, and a wake-up only if someone waits.
    """

    __slots__ = ("_abort", "_ended", "_error", "_fragments", "_future", "_loop", "id", "prompt_tokens")

    def __init__(self, request_id: str, prompt_tokens: int, abort: Callable[[], None]) -> None:
        self.id = request_id
        self.prompt_tokens = prompt_tokens
        self._abort = abort
        self._fragments: deque[Fragment] = deque()
        self._future: asyncio.Future[None] | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()  # looking it up costs a system call in 3.11

    @property
    def backlog(self) -> int:
        """The number of fragments that wait to be taken."""
        return len(self._fragments)

    async def take(self) -> list[Fragment]:
        """Everything that waits, at least one fragment; [] once the request has ended.

        Raises `EngineFailedError` or `EngineClosedError` after the fragments that came before the failure.
        """
        if not self._fragments and not self._ended:
            self._future = self._loop.create_future()
            try:
                await self._future
            finally:
                self._future = None
        fragments = list(self._fragments)
        self._fragments.clear()
        if not fragments and self._error is not None:
            raise self._error
        return fragments

    def abort(self) -> None:
        """Give up the request and give its memory back. Synchronous; does nothing once it has ended."""
        self._abort()

    def put(self, fragment: Fragment, last: bool) -> None:
        """For the engine: add a fragment; `last` ends the stream."""
        self._fragments.append(fragment)
        self._ended = last
        self._wake()

    def fail(self, error: BaseException) -> None:
        """For the engine: end the stream with an error."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)
