"""The stream of one request's fragments, and two functions that read a stream to its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from aengine.errors import EngineClosedError
from aengine.types import Choice, Completion, Fragment, PromptLogprob, TokenLogprob, ToolCallDelta, join_calls


class Stream:
    """The fragments of one request, in order. The engine adds them, and one consumer takes them.

    It is fast: a token costs one append to a deque, and a wake-up only if the consumer waits.
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
        self._loop = asyncio.get_running_loop()  # kept, because a lookup costs a system call in Python 3.11

    @property
    def backlog(self) -> int:
        """The number of fragments that the consumer has not taken yet."""
        return len(self._fragments)

    async def take(self) -> list[Fragment]:
        """Wait for fragments and return all that have arrived. Returns [] if the request has ended.

        Raises the request's error after all fragments before it have been taken.
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
        """End the request and free its memory. Synchronous. Does nothing once it has ended."""
        self._abort()

    def put(self, fragment: Fragment, last: bool) -> None:
        """Add a fragment. last: whether it ends the stream. Only the engine calls this."""
        self._fragments.append(fragment)
        self._ended = last
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error. Only the engine calls this."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)


class FragmentStream(Protocol):
    """The interface of streams: of an engine in this process, or of a server."""

    id: str

    async def take(self) -> list[Fragment]: ...

    def abort(self) -> None: ...


async def drain(submit: Callable[[], Awaitable[FragmentStream]]) -> AsyncGenerator[Fragment, None]:
    """Iterate over a request's fragments. Aborts the request if the consumer stops early."""
    stream = await submit()
    try:
        while fragments := await stream.take():
            for fragment in fragments:
                yield fragment
    finally:
        stream.abort()  # synchronous, because a generator that is being closed must not await


async def collect(stream: FragmentStream) -> Completion:
    """Read a request to its end and join its fragments."""
    texts: dict[int, list[str]] = {}
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    scores: dict[int, Sequence[PromptLogprob]] = {}
    thoughts: dict[int, list[str]] = {}
    calls: dict[int, list[ToolCallDelta]] = {}
    choices: list[Choice] = []
    usage = None
    try:
        while fragments := await stream.take():
            for fragment in fragments:
                index = fragment.index
                texts.setdefault(index, []).append(fragment.text)
                ids.setdefault(index, []).extend(fragment.token_ids)
                thoughts.setdefault(index, []).append(fragment.reasoning)
                calls.setdefault(index, []).extend(fragment.tool_calls)
                if fragment.logprobs is not None:
                    logprobs.setdefault(index, []).extend(fragment.logprobs)
                if fragment.prompt_logprobs is not None:
                    scores[index] = fragment.prompt_logprobs
                usage = fragment.usage or usage
                if fragment.finish_reason is not None:
                    choices.append(
                        Choice(
                            index=index,
                            text="".join(texts[index]),
                            token_ids=tuple(ids[index]),
                            finish_reason=fragment.finish_reason,
                            logprobs=tuple(logprobs[index]) if index in logprobs else None,
                            prompt_logprobs=scores.get(index),
                            stop_string=fragment.stop_string,
                            reasoning="".join(thoughts[index]),
                            tool_calls=join_calls(calls[index]),
                        )
                    )
    finally:
        stream.abort()
    if usage is None:
        raise EngineClosedError("the request ended without its last fragment")
    return Completion(id=stream.id, choices=tuple(sorted(choices, key=lambda choice: choice.index)), usage=usage)
