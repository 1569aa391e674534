"""Requests that generate. Turns committed tokens into text fragments, and puts them on the request's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from aengine.engine.requests.request import Owner, Request
from aengine.engine.requests.stream import Stream
from aengine.errors import NonFiniteLogitsError
from aengine.latency import Latencies
from aengine.scheduling.sequence import Sequence as TokenSequence
from aengine.scheduling.sequence import Update, sibling_of
from aengine.step_plan import RowLogprobs
from aengine.text.grammar.grammars import Matcher
from aengine.text.tokens.output import OutputText
from aengine.text.tokens.tokenizer import Tokenizer
from aengine.types import FinishReason, Fragment, PromptLogprob, TokenLogprob, TopLogprob, Usage


class LiveRequest(Request):
    """A request that generates: its choices, its stream and its token counts.

    `choices` contains the first choice from the start, and each other choice when it begins.
    """

    __slots__ = (
        "_grammar",
        "_on_end",
        "arrived",
        "began",
        "choices",
        "ended",
        "first_token",
        "id",
        "latencies",
        "open_choices",
        "stream",
        "tokenizer",
    )

    def __init__(
        self,
        request_id: str,
        sequence: TokenSequence,
        grammar: Matcher | None,
        tokenizer: Tokenizer,
        abort: Callable[[Request], None],
        on_end: Callable[[Request], None],
        latencies: Latencies,
    ) -> None:
        """sequence: of the first choice. grammar: a matcher at its start. Each choice gets a copy."""
        self.id = request_id
        self.tokenizer = tokenizer
        self.latencies = latencies
        self.arrived = monotonic()
        self.began = 0.0  # monotonic seconds when it first got a row; 0: not yet
        self.first_token = 0.0  # monotonic seconds of the first choice's first token; 0: not yet
        self.open_choices = sequence.params.n
        self.ended = False
        self.stream = Stream(request_id, sequence.prompt_len, lambda: abort(self))
        self._on_end = on_end
        self._grammar = grammar
        self.choices: list[LiveChoice] = []
        self._add(sequence)

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences of the choices that have begun."""
        return [choice.sequence for choice in self.choices]

    def make_sibling(self, index: int) -> TokenSequence:
        """Return the sequence of another choice, which begins now."""
        first = self.choices[0].sequence
        sibling = sibling_of(first, index)
        sibling.seed = sibling_seed(first.seed, index)
        self._add(sibling)
        return sibling

    def _add(self, sequence: TokenSequence) -> None:
        grammar = None if self._grammar is None else self._grammar.copy()
        sequence.grammar = grammar
        self.choices.append(LiveChoice(self, sequence, grammar))

    def begin(self) -> None:
        """Record the time in the queue. Called when the first choice enters the running batch."""
        if not self.began:
            self.began = monotonic()
            self.latencies.queued.observe(self.began - self.arrived)

    def end(self) -> None:
        """Mark the request as ended. Must be called once."""
        self.ended = True
        self._on_end(self)

    def fail(self, error: BaseException) -> None:
        """End the request and its stream with an error."""
        if not self.ended:
            self.latencies.ended["error"] += self.open_choices
            self.end()
            self.stream.fail(error)

    def abort(self) -> None:
        """End every choice with the reason `abort`, including choices that have not begun."""
        for choice in self.choices:
            choice.end("abort")
        for index in range(len(self.choices), self.choices[0].sequence.params.n):
            self.put(index, "", reason="abort")

    def put(
        self,
        index: int,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        reason: FinishReason | None = None,
        scores: Sequence[PromptLogprob] | None = None,
        stop_string: str | None = None,
    ) -> None:
        """Put a choice's fragment on the stream. reason: why the choice ends. None: it continues."""
        usage = None
        if reason is not None:
            self.open_choices -= 1
            self.latencies.ended[reason] += 1
            if self.open_choices == 0:
                if reason != "abort":
                    self._observe()
                self.end()
                usage = self.usage()
        self.stream.put(
            Fragment(
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=reason,
                usage=usage,
                index=index,
                prompt_logprobs=scores,
                stop_string=stop_string,
            ),
            last=self.ended,
        )

    def _observe(self) -> None:
        """Record the durations and token counts of the request. Called when it ends."""
        now, seen, leader = monotonic(), self.latencies, self.choices[0].sequence
        most = max(choice.delivered for choice in self.choices)
        decode = now - self.first_token
        seen.whole.observe(now - self.arrived)
        seen.inference.observe(now - self.began)
        seen.prefill.observe(self.first_token - self.began)
        seen.decode.observe(decode)
        if most > 1:
            seen.mean_inter_token.observe(decode / (most - 1))
        seen.prompt_tokens.observe(leader.prompt_len)
        seen.computed_prompt_tokens.observe(leader.prompt_len - (leader.cached or 0))
        for choice in self.choices:
            seen.generated_tokens.observe(choice.delivered)
        seen.most_generated_tokens.observe(most)
        seen.choices.observe(leader.params.n)
        seen.max_tokens.observe(leader.max_output)

    def usage(self) -> Usage:
        """Return the token counts so far."""
        leader = self.choices[0].sequence
        return Usage(
            prompt_tokens=leader.prompt_len,
            completion_tokens=sum(choice.delivered for choice in self.choices),
            cached_tokens=leader.cached or 0,
        )


class LiveChoice(Owner):
    """One of the n outputs of a request. Detokenizes the tokens of its sequence."""

    __slots__ = ("delivered", "finish_reason", "grammar", "last_token", "request", "sequence", "text", "tokenizer")

    request: LiveRequest

    def __init__(self, request: LiveRequest, sequence: TokenSequence, grammar: Matcher | None) -> None:
        self.request = request
        self.sequence = sequence
        self.grammar = grammar
        self.tokenizer = request.tokenizer
        self.text = OutputText(self.tokenizer, sequence.params, sequence.prompt)
        self.delivered = 0  # output tokens handed to the stream
        self.finish_reason: FinishReason | None = None
        self.last_token = 0.0  # monotonic seconds; 0 before the first
        sequence.owner = self

    def deliver(self, update: Update) -> int:
        if not update.finite:
            raise NonFiniteLogitsError(
                f"the model produced NaN or infinity after {self.delivered} output tokens of this request"
            )
        token_ids, reason, output = update.token_ids, update.finish_reason, self.text
        is_hidden = reason == "stop" and not self.sequence.params.include_stop  # the stop token has no text
        text, count = "", 0
        for token_id in token_ids[:-1] if is_hidden else token_ids:
            text += output.feed(token_id)
            count += 1  # noqa: SIM113 - enumerate() is slower, and this line runs for each token
            if output.stop_string is not None:
                token_ids, reason = token_ids[:count], "stop"
                break
        if reason is not None:
            text += output.finish()
        scores = None if self.delivered else self._scores()
        count = len(token_ids)  # with a hidden stop token
        self.delivered += count
        self._time(count)
        logprobs = None
        if update.logprobs is not None:
            rows = zip(token_ids, update.logprobs)
            logprobs = tuple(self._logprob(token_id, row) for token_id, row in rows if row is not None) or None
        self.finish_reason = reason
        self.request.put(self.sequence.index, text, token_ids, logprobs, reason, scores, output.stop_string)
        if reason is None or (update.finish_reason is not None and count == len(update.token_ids)):
            return 0
        return self.delivered  # a stop string ended the output, of which the scheduler does not know

    def end(self, reason: FinishReason) -> None:
        """End the choice with this reason, and put its remaining text on the stream."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.request.put(self.sequence.index, self.text.finish(), reason=reason)

    def _scores(self) -> Sequence[PromptLogprob] | None:
        """Return the prompt's logprobs, if the request wants them."""
        return self.sequence.scores if self.sequence.params.prompt_logprobs is not None else None

    def _time(self, count: int) -> None:
        """Record the arrival of `count` tokens. Tokens that arrive together share the time since the last token."""
        now, last = monotonic(), self.last_token
        self.last_token = now
        if last:
            self.request.latencies.inter_token.observe((now - last) / count, count)
            return
        if self.sequence.index == 0:
            self.request.first_token = now
            self.request.latencies.first_token.observe(now - self.request.arrived)
        if count > 1:
            self.request.latencies.inter_token.observe(0.0, count - 1)

    def _logprob(self, token_id: int, row: RowLogprobs) -> TokenLogprob:
        text = self.tokenizer.token_text
        top = tuple(
            TopLogprob(candidate, text(candidate), value) for candidate, value in zip(row.top_ids, row.top, strict=True)
        )
        return TokenLogprob(token_id, text(token_id), row.sampled, top)


def begin(sequence: TokenSequence) -> None:
    """Start the timing of a sequence's request. The scheduler calls this when the sequence first gets a row."""
    if isinstance(sequence.owner, Owner):
        sequence.owner.request.begin()


def make_sibling(leader: TokenSequence, index: int) -> TokenSequence:
    """Return the sequence of a new choice that forks from `leader`. The scheduler calls this."""
    if not isinstance(leader.owner, LiveChoice):
        raise TypeError("only choices of live requests fork")
    return leader.owner.request.make_sibling(index)


def sibling_seed(seed: int, index: int) -> int:
    """Return the seed of a choice: the request's seed for choice 0, and unrelated seeds for the others."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF  # splitmix64's increment and finalizer
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1
