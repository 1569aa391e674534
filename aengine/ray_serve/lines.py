"""The ingress' lines, one to each replica that answers several of its calls at once."""

from __future__ import annotations

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
    """A replica as the ingress sees it: which calls it answers, and whether there is a line to it."""

    __slots__ = ("calls", "open", "replica")

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.calls: set[int] = set()
        self.open = False


class Lines:
    """Opens a line where a second call is being answered by one replica: of a single one nothing could be put together.

    Which way a stream takes is the replica's choice: it knows when the line is there.
    """

    def __init__(self, handle: DeploymentHandle[Any], name: str, open_timeout: float) -> None:
        self._handle = handle
        self._name = name
        self._open_timeout = open_timeout
        self._numbers = count()
        self._inboxes: dict[int, Inbox] = {}
        self._lines: dict[str, Line] = {}  # by replica
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
        await self._stack.aclose()

    def register(self) -> tuple[int, Inbox]:
        """The number of a new call, and where its pieces arrive if they take a line."""
        number, inbox = next(self._numbers), Inbox()
        self._inboxes[number] = inbox
        return number, inbox

    def enter(self, replica: str, number: int) -> Line:
        """Note that a replica has taken the call up."""
        line = self._lines.setdefault(replica, Line(replica))
        line.calls.add(number)
        if len(line.calls) > 1 and not line.open and self._tasks is not None:
            line.open = True
            self._tasks.start_soon(self._run, line)
        return line

    def leave(self, line: Line | None, number: int) -> None:
        """Forget a call; what still comes of it is dropped."""
        del self._inboxes[number]
        if line is not None:
            line.calls.discard(number)
            self._drop(line)

    async def _run(self, line: Line) -> None:
        stream = self._handle.remote(router=self._name, to=line.replica)
        try:
            with anyio.fail_after(self._open_timeout):
                await anext(stream)
            async for batch in stream:
                deliver(batch, self._inboxes)
        except Exception as error:  # noqa: BLE001  # Ray has many words for an actor that is no more
            _log.info("the line to replica %s broke: %s", line.replica, type(error).__name__)
            for number in line.calls:
                self._inboxes[number].break_off()
        finally:
            stream.cancel()
            line.open = False
            self._drop(line)

    def _drop(self, line: Line) -> None:
        if not line.calls and not line.open and self._lines.get(line.replica) is line:
            del self._lines[line.replica]
