"""Reads several streams as one, for a request with a list of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from aengine.http.engine_like import StreamLike
from aengine.types import Fragment, Usage


class GatheredStream:
    """The choices of all streams as one stream. Choice j of stream i gets the number i * n + j.

    The last fragment has the usage of all streams, summed. The first error of a stream ends the whole stream.
    """

    def __init__(self, request_id: str, streams: Sequence[StreamLike], n: int) -> None:
        self.id = request_id
        self._streams = streams
        self._n = n
        self._takes: dict[asyncio.Task[list[Fragment]], int] | None = None  # one for each unfinished stream
        self._usage = Usage(0, 0, 0)

    @property
    def prompt_tokens(self) -> int:
        return sum(stream.prompt_tokens for stream in self._streams)

    @property
    def backlog(self) -> int:
        return sum(stream.backlog for stream in self._streams)

    async def take(self) -> list[Fragment]:
        if self._takes is None:
            self._takes = {self._begin(position): position for position in range(len(self._streams))}
        taken: list[Fragment] = []
        while self._takes and not taken:
            done, _ = await asyncio.wait(self._takes, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                position = self._takes.pop(task)
                fragments = task.result()  # raises the stream's error
                taken += [self._renumbered(fragment, position) for fragment in fragments]
                if fragments and fragments[-1].usage is None:
                    self._takes[self._begin(position)] = position
        if taken and not self._takes:
            taken[-1] = msgspec.structs.replace(taken[-1], usage=self._usage)
        return taken

    def _begin(self, position: int) -> asyncio.Task[list[Fragment]]:
        task = asyncio.ensure_future(self._streams[position].take())
        task.add_done_callback(_retrieve_error)
        return task

    def _renumbered(self, fragment: Fragment, position: int) -> Fragment:
        if (usage := fragment.usage) is not None:
            total = self._usage
            self._usage = Usage(
                total.prompt_tokens + usage.prompt_tokens,
                total.completion_tokens + usage.completion_tokens,
                total.cached_tokens + usage.cached_tokens,
            )
        return msgspec.structs.replace(fragment, index=position * self._n + fragment.index, usage=None)

    def abort(self) -> None:
        """Abort all streams. Their `take` calls end as well: an aborted stream returns its last fragment at once."""
        for stream in self._streams:
            stream.abort()


def _retrieve_error(task: asyncio.Task[list[Fragment]]) -> None:
    # Only the first error is raised. asyncio would log the other errors if they were not retrieved.
    if not task.cancelled():
        task.exception()
