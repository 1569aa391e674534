"""The ingress' lines, one to each replica that answers several of its calls at once."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from itertools import count
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from ray.serve.handle import DeploymentHandle

from aengine.ray_serve.line import Inbox, deliver

_log = logging.getLogger("aengine")


class Line:
    """A replica as the ingress sees it: the calls that it answers, and the line to it."""

    __slots__ = ("calls", "followers", "number", "replica")

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.calls: set[int] = set()
        self.number: int | None = None  # of the line that is open, or being opened
        self.followers: set[int] = set()  # calls whose answers take it


class Lines:
    """Opens a line where a second call is being answered by one replica: of a single one nothing could be put together.

    Which way a stream takes is the replica's choice: it knows when the line is there.
    """

    def __init__(self, handle: DeploymentHandle[Any], name: str, open_timeout: float) -> None:
        self._handle = handle
        self._name = name
        self._open_timeout = open_timeout
        self._numbers = count()
        self._inboxes: dict[int, Inbox] = {}  # by call
        self._lines: dict[str, Line] = {}  # by replica
        self._to_open: asyncio.Queue[Line] = asyncio.Queue()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._open_lines, tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def register(self) -> tuple[int, Inbox]:
        """The number of a new call, and where its pieces arrive if they take a line."""
        call, inbox = next(self._numbers), Inbox()
        self._inboxes[call] = inbox
        return call, inbox

    def enter(self, replica: str, call: int) -> Line:
        """Note that a replica has taken the call up."""
        line = self._lines.setdefault(replica, Line(replica))
        line.calls.add(call)
        if len(line.calls) > 1 and line.number is None:
            line.number = next(self._numbers)
            self._to_open.put_nowait(line)
        return line

    def follow(self, line: Line, call: int, number: int) -> None:
        """Note that the rest of the call's answer comes by the line of this number."""
        if line.number == number:
            line.followers.add(call)
        else:
            self._inboxes[call].break_off()  # that line is no more

    def leave(self, line: Line | None, call: int) -> None:
        """Forget a call; what still comes of it is dropped."""
        del self._inboxes[call]
        if line is not None:
            line.calls.discard(call)
            line.followers.discard(call)
            self._drop(line)

    async def _open_lines(self, tasks: TaskGroup) -> None:
        # Here rather than where a call asks for it: what is sent from a request's context Ray cancels with the request.
        while True:
            tasks.start_soon(self._run, await self._to_open.get())

    async def _run(self, line: Line) -> None:
        stream = self._handle.remote(router=self._name, number=line.number, to=line.replica)
        try:
            with anyio.fail_after(self._open_timeout):
                await anext(stream)
            async for batch in stream:
                deliver(batch, self._inboxes)
        except Exception as error:  # noqa: BLE001  # Ray has many words for an actor that is no more
            _log.info("the line to replica %s broke: %s", line.replica, type(error).__name__)
        finally:
            stream.cancel()
            line.number = None
            for call in line.followers:
                self._inboxes[call].break_off()
            line.followers.clear()
            self._drop(line)

    def _drop(self, line: Line) -> None:
        if not line.calls and line.number is None and self._lines.get(line.replica) is line:
            del self._lines[line.replica]
