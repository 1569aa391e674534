"""The stream of one request on a server, with the interface of the engine's `Stream`."""

from __future__ import annotations

import anyio

from aengine.engine.requests.stream import Stream
from aengine.errors import AengineError, EngineClosedError
from aengine.types import Fragment

MAX_BACKLOG = 1024  # fragments that may wait; with more the connection is not read, which slows the server


class RemoteStream:
    """The fragments of one request, in order. One consumer takes them; the task that reads the connection puts them."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.connection = anyio.CancelScope()  # of the reading task
        self.answered = anyio.Event()  # the server has begun to answer, or the request has failed
        self.closed = anyio.Event()  # the connection is closed
        self._mailbox = Stream(request_id, 0, self._fail_aborted)
        self._error: AengineError | None = None
        self._ended = False
        self._room = anyio.Event()

    @property
    def backlog(self) -> int:
        """The number of fragments that wait for the consumer."""
        return self._mailbox.backlog

    async def take(self) -> list[Fragment]:
        """Return all waiting fragments, at least one; [] after the end. Raises the error that ended the request."""
        fragments = await self._mailbox.take()
        self._room.set()
        return fragments

    def abort(self) -> None:
        """Close the connection, so that the server ends the request. Does nothing after the end."""
        self._mailbox.abort()

    def _fail_aborted(self) -> None:
        self.fail(EngineClosedError("the request was aborted"))

    async def admitted(self) -> None:
        """Wait until the server begins to answer. Raises the error that it answers with."""
        await self.answered.wait()
        if self._error is not None:
            raise self._error

    async def put(self, fragment: Fragment) -> None:
        """Add a fragment, and wait while the consumer is far behind. Called by the reading task."""
        self._ended = fragment.usage is not None
        self._mailbox.put(fragment, last=self._ended)
        while self._mailbox.backlog > MAX_BACKLOG:
            self._room = anyio.Event()
            await self._room.wait()

    def fail(self, error: AengineError) -> None:
        """End the request with an error, and close its connection. Does nothing after the end."""
        if self._ended:
            return
        self._ended, self._error = True, error
        self._mailbox.fail(error)
        self.connection.cancel()
        self.answered.set()
