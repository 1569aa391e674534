"""Requests while they live: from committed draws to text fragments in the request's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from aengine.engine.stream import Stream
from aengine.errors import NonFiniteLogitsError
from aengine.latency import Latencies
from aengine.scheduling.sequence import Sequence as TokenSequence
from aengine.scheduling.sequence import Update
from aengine.text.tokens.output import OutputText
from aengine.text.tokens.tokenizer import Tokenizer
from aengine.types import FinishReason, Fragment, PromptLogprob, RowLogprobs, TokenLogprob, TopLogprob, Usage


class LiveRequest:
    """One request: its n choices, its stream, and the usage that its last fragment reports."""

    __slots__ = ("_on_end", "arrived", "began", "choices", "ended", "id", "latencies", "open_choices", "stream")

    def __init__(
        self,
        request_id: str,
        choices: list[LiveChoice],
        abort: Callable[[LiveRequest], None],
        on_end: Callable[[LiveRequest], None],
        latencies: Latencies,
    ) -> None:
        self.id = request_id
        self.latencies = latencies
        self.arrived = monotonic()
        self.began = False  # it has been on a row
        self.choices = choices
        self.open_choices = len(choices)
        self.ended = False
        self.stream = Stream(request_id, choices[0].sequence.prompt_len, lambda: abort(self))
        self._on_end = on_end
        for choice in choices:
            choice.request = self

    def begin(self) -> None:
        """A choice enters the running batch; the first to do so ends the request's time in the queue."""
        if not self.began:
            self.began = True
            self.latencies.queued.observe(monotonic() - self.arrived)

    def end(self) -> None:
        """Nothing more will come; once only."""
        self.ended = True
        self._on_end(self)

    def fail(self, error: BaseException) -> None:
        """End the request and its stream with an error."""
        if not self.ended:
            self.latencies.ended["error"] += self.open_choices
            self.end()
            self.stream.fail(error)

    def usage(self) -> Usage:
        """What went in and came out so far."""
        leader = self.choices[0].sequence
        return Usage(
            prompt_tokens=leader.prompt_len,
            completion_tokens=sum(choice.delivered for choice in self.choices),
            cached_tokens=leader.cached or 0,
        )


class LiveChoice:
    """One of the n outputs of a request: detokenizes what its sequence draws."""

    __slots__ = ("delivered", "finish_reason", "last_token", "request", "sequence", "text", "tokenizer")

    request: LiveRequest

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self.tokenizer = tokenizer
        self.text = OutputText(tokenizer, sequence.params, sequence.tokens)
        self.delivered = 0  # output tokens handed to the stream
        self.finish_reason: FinishReason | None = None
        self.last_token = 0.0  # monotonic seconds; 0 before the first
        sequence.owner = self

    def deliver(self, update: Update) -> bool:
        """Turn one committed draw into a fragment. True: a stop string matched, so the sequence must end here.

        Raises `NonFiniteLogitsError` for a draw that has no token.
        """
        if not update.finite:
            raise NonFiniteLogitsError(
                f"the model produced NaN or infinity after {self.delivered} output tokens of this request"
            )
        reason = update.finish_reason
        stopped = False
        if reason == "stop" and not self.sequence.params.include_stop:
            text = self.text.finish()  # the stop token's own text stays out
        else:
            text = self.text.feed(update.token_id)
            if self.text.stopped:
                stopped = reason is None
                reason = "stop"
            if reason is not None:
                text += self.text.finish()
        self.delivered += 1
        self._time()
        logprobs = None
        if update.logprobs is not None:
            logprobs = (self._logprob(update.token_id, update.logprobs),)
        self._put(text, (update.token_id,), logprobs, reason, self._scores() if self.delivered == 1 else None)
        return stopped

    def end(self, reason: FinishReason) -> None:
        """Close the choice from outside (abort): flush the held text."""
        if self.finish_reason is None:
            self._put(self.text.finish(), (), None, reason)

    def _scores(self) -> Sequence[PromptLogprob] | None:
        """What was asked for about the prompt."""
        return self.sequence.scores if self.sequence.params.prompt_logprobs is not None else None

    def _time(self) -> None:
        """Note when this token came."""
        now, last = monotonic(), self.last_token
        self.last_token = now
        if last:
            self.request.latencies.inter_token.observe(now - last)
        elif self.sequence.index == 0:
            self.request.latencies.first_token.observe(now - self.request.arrived)

    def _put(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        reason: FinishReason | None,
        scores: Sequence[PromptLogprob] | None = None,
    ) -> None:
        request = self.request
        usage = None
        if reason is not None:
            self.finish_reason = reason
            request.open_choices -= 1
            request.latencies.ended[reason] += 1
            if request.open_choices == 0:
                if reason != "abort":
                    request.latencies.whole.observe(monotonic() - request.arrived)
                request.end()
                usage = request.usage()
        request.stream.put(
            Fragment(
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=reason,
                usage=usage,
                index=self.sequence.index,
                prompt_logprobs=scores,
            ),
            last=request.ended,
        )

    def _logprob(self, token_id: int, row: RowLogprobs) -> TokenLogprob:
        text = self.tokenizer.token_text
        top = tuple(
            TopLogprob(candidate, text(candidate), value) for candidate, value in zip(row.top_ids, row.top, strict=True)
        )
        return TokenLogprob(token_id, text(token_id), row.sampled, top)


def begin(sequence: TokenSequence) -> None:
    """For the scheduler: the sequence enters the running batch for the first time."""
    if isinstance(sequence.owner, LiveChoice):
        sequence.owner.request.begin()
