"""The registry of running requests, and the gate that holds or refuses new requests."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable

from aengine.engine.requests.request import Owner, Request
from aengine.errors import (
    AengineError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
)
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Sequence as TokenSequence


class Requests:
    """All enqueued requests that have not ended."""

    def __init__(
        self, scheduler: Scheduler, wake: Callable[[], None], *, priority_aging: float, most_held: int
    ) -> None:
        """wake: called when the scheduler may have new work.

        priority_aging: how many seconds of waiting outweigh one level of priority.
        most_held: the most requests that may wait at the gate.
        """
        self.gate = Gate(most_held)
        self.failure: BaseException | None = None  # the error that ended the service
        self.ended = 0  # how many requests have ended
        self.wake = wake
        self.on_begin: Callable[[Request], None] | None = None  # called with each enqueued request
        self._scheduler = scheduler
        self._priority_aging = priority_aging
        self._live: dict[str, Request] = {}
        self._tickets = itertools.count()
        self._closed = False
        self._emptied = asyncio.Event()  # set when the last request has ended

    def check(self) -> None:
        """Raise `EngineClosedError` or `EngineFailedError` if the engine is closed or has failed."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self.failure is not None:
            raise EngineFailedError(f"the engine failed: {type(self.failure).__name__}")

    def new_id(self, request_id: str | None) -> str:
        """Return `request_id`, or a random id for None. Raises `InvalidRequestError` if a running request has it."""
        request_id = request_id or secrets.token_hex(12)
        if request_id in self._live:
            raise InvalidRequestError(f"a request with the id {request_id!r} is already running", "request_id")
        return request_id

    def rank(self, priority: int) -> tuple[float, int]:
        """Return the sort key of a new request in the queue."""
        return time.monotonic() + priority * self._priority_aging, next(self._tickets)

    def begin(self, request: Request) -> None:
        """Register a request whose sequences were just given to the scheduler."""
        self._live[request.id] = request
        if self.on_begin is not None:
            self.on_begin(request)
        self.wake()

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        del self._live[request.id]
        self.ended += 1
        if not self._live:
            self._emptied.set()

    # ---- ending requests ------------------------------------------------------------------------------------

    def abort_id(self, request_id: str) -> bool:
        """Abort a request by its id. Returns False if no such request is running."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self.abort(request)
        return True

    def abort(self, request: Request) -> None:
        """End a request now and free its memory. Does nothing once it has ended."""
        if not request.ended:
            self._end_sequences(request)
            request.abort()

    def abort_all(self) -> None:
        """End all requests now."""
        for request in list(self._live.values()):
            self.abort(request)

    def fail(self, request: Request, error: AengineError) -> None:
        """End a request with an error: all its choices or prompts."""
        self._end_sequences(request)
        request.fail(error)

    def fail_sequence(self, sequence: TokenSequence, error: AengineError) -> None:
        """End the request of a sequence with an error."""
        if isinstance(sequence.owner, Owner):
            self.fail(sequence.owner.request, error)

    def close(self) -> None:
        """End all requests with `EngineClosedError`, and refuse new ones."""
        self._closed = True
        for request in list(self._live.values()):
            self.fail(request, EngineClosedError("the engine was closed"))

    def fail_all(self, error: Exception) -> None:
        """End all requests because the engine failed, and refuse new ones."""
        self.failure = error
        failure = EngineFailedError(f"the engine failed: {type(error).__name__}")
        failure.__cause__ = error
        for request in list(self._live.values()):
            request.fail(failure)  # the scheduler is not called, because the error may be its own

    async def wait_until_empty(self) -> None:
        """Wait until no request is running."""
        while self._live:
            self._emptied.clear()
            await self._emptied.wait()

    def _end_sequences(self, request: Request) -> None:
        for sequence in request.sequences:
            self._scheduler.abort(sequence)
        self.wake()  # an adapter may have lost its last user


class Gate:
    """Accepts new requests, refuses them, or holds them until it opens."""

    def __init__(self, most_held: int) -> None:
        self._most_held = most_held
        self.refusal = ""  # why requests are refused; empty: they are not refused
        self._opening: asyncio.Event | None = None  # None: requests are not held
        self.held = 0  # how many requests wait

    @property
    def holding(self) -> bool:
        """Whether new requests wait."""
        return self._opening is not None

    def check(self) -> None:
        """Raise `EngineNotReadyError` if requests are refused."""
        if self.refusal:
            raise EngineNotReadyError(self.refusal)

    async def enter(self) -> None:
        """Wait until the gate is open. Raises `EngineNotReadyError`, and `QueueFullError` if too many wait."""
        while True:
            self.check()
            if self._opening is None:
                return
            if self.held >= self._most_held:
                raise QueueFullError(f"{self.held} requests wait until the weights are reloaded, which is the most")
            self.held += 1
            try:
                await self._opening.wait()
            finally:
                self.held -= 1

    def refuse(self, why: str) -> None:
        """Refuse requests from now on, including held ones."""
        self.refusal = why
        self._release()

    def hold(self) -> None:
        """Hold requests from now on."""
        self.refusal = ""
        self._opening = self._opening or asyncio.Event()

    def open(self) -> None:
        """Accept requests. Held requests come first."""
        self.refusal = ""
        self._release()

    def _release(self) -> None:
        if self._opening is not None:
            self._opening.set()
            self._opening = None
