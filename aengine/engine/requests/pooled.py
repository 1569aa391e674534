"""A request whose prompts are pooled. Its future is done when the last prompt has ended."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from time import monotonic

from aengine.engine.requests.request import Owner, Request
from aengine.errors import NonFiniteLogitsError, RequestAbortedError
from aengine.latency import Latencies
from aengine.scheduling.sequence import Sequence as TokenSequence
from aengine.scheduling.sequence import Update
from aengine.types import FinishReason, Usage


class PooledRequest(Request):
    """The prompts of one call, and the future that its caller awaits."""

    __slots__ = ("_on_end", "_unended", "arrived", "began", "done", "ended", "id", "latencies", "prompts")

    def __init__(
        self,
        request_id: str,
        sequences: Sequence[TokenSequence],
        on_end: Callable[[Request], None],
        latencies: Latencies,
    ) -> None:
        self.id = request_id
        self.latencies = latencies
        self.arrived = monotonic()
        self.began = False  # whether a prompt has got a row
        self.ended = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.prompts = [PooledPrompt(self, sequence) for sequence in sequences]
        self._unended = len(self.prompts)
        self._on_end = on_end

    @property
    def sequences(self) -> list[TokenSequence]:
        return [prompt.sequence for prompt in self.prompts]

    @property
    def vectors(self) -> list[list[array[float]]]:
        """The vectors of each prompt's chunks, once the request is done."""
        return [sequence.pooled for sequence in self.sequences]

    def begin(self) -> None:
        """Record the time in the queue. Called when the first prompt enters the running batch."""
        if not self.began:
            self.began = True
            self.latencies.queued.observe(monotonic() - self.arrived)

    def prompt_ended(self) -> None:
        """Count the end of one prompt. After the last prompt, the request is done."""
        self.latencies.ended["stop"] += 1
        self._unended -= 1
        if not self._unended:
            self.latencies.whole.observe(monotonic() - self.arrived)
            for sequence in self.sequences:
                self.latencies.prompt_tokens.observe(sequence.prompt_len)
                self.latencies.computed_prompt_tokens.observe(sequence.prompt_len - (sequence.cached or 0))
            self._end(None, None)

    def fail(self, error: BaseException) -> None:
        """End the request with an error. Does nothing once it has ended."""
        self._end(error, "error")

    def abort(self) -> None:
        """End the request with `RequestAbortedError`. Does nothing once it has ended."""
        self._end(RequestAbortedError("the request was aborted"), "abort")

    def usage(self) -> Usage:
        """Return the token counts of all prompts together."""
        sequences = self.sequences
        return Usage(
            prompt_tokens=sum(sequence.prompt_len for sequence in sequences),
            completion_tokens=0,
            cached_tokens=sum(sequence.cached or 0 for sequence in sequences),
        )

    def _end(self, error: BaseException | None, reason: FinishReason | None) -> None:
        if self.ended:
            return
        self.ended = True
        if reason is not None:
            self.latencies.ended[reason] += self._unended
        self._on_end(self)
        if self.done.done():  # the caller was cancelled
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()  # retrieved, so that asyncio does not log it if the caller was cancelled


class PooledPrompt(Owner):
    """One prompt of a request."""

    __slots__ = ("finish_reason", "request", "sequence")

    request: PooledRequest

    def __init__(self, request: PooledRequest, sequence: TokenSequence) -> None:
        self.request = request
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        sequence.owner = self

    def deliver(self, update: Update) -> int:
        if not update.finite:
            raise NonFiniteLogitsError("the model produced NaN or infinity for a prompt of this request")
        self.finish_reason = update.finish_reason
        self.request.prompt_ended()
        return 0
