"""The data that crosses rooms: requests' parameters, fragments and completions, and the plan of one step.

No torch in here, and no behaviour beyond validation and small derived properties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from aengine.errors import InvalidRequestError
from aengine.structured import Structured

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters; bounds what a stream holds back
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 128  # characters
_INT64 = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to draw tokens and when to stop. Ranges are checked by `validate`, not at construction.

    The order of the steps is logit_bias, repetition/presence/frequency penalty, masks, temperature,
    top_k, top_p, min_p, draw. `temperature=0` is argmax.
    """

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0  # EOS and stop ids are masked before that many tokens
    temperature: float = 1.0  # [0, 2]
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # > 0; over prompt and output, as Hugging Face defines it
    presence_penalty: float = 0.0  # [-2, 2]; over output, as OpenAI defines it
    frequency_penalty: float = 0.0  # [-2, 2]; over output, as OpenAI defines it
    logit_bias: Mapping[int, float] = {}  # token id -> added to the logit, [-100, 100]
    seed: int | None = None  # None: drawn afresh for each request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()  # their tokens never follow one another, with a space in front or without
    allowed_token_ids: tuple[int, ...] | None = None  # no other is drawn; not even EOS, unless it is among them
    include_stop: bool = False  # keep the matched stop string / stop token's text in the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: tuple[int, ...] = ()  # special tokens that are written in the text all the same
    logprobs: int | None = None  # None: none; 0: the sampled token's; k: and the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    n: int = 1
    structured: Structured | None = None  # what the output must match

    @property
    def penalized(self) -> bool:
        """Whether any penalty needs token counts."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in its range."""
        for name in _FLOATS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise InvalidRequestError(f"{name} must be a finite number, got {value!r}", name)
        for name in _INTS:
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be an integer, got {value!r}", name)
        _within("temperature", self.temperature, 0, 2)
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        if self.top_k < -1:
            raise InvalidRequestError(f"top_k must be -1 or 0 (off) or at least 1, got {self.top_k}", "top_k")
        if not 0 < self.repetition_penalty <= 1e4:
            raise InvalidRequestError(
                f"repetition_penalty must be above 0 and at most 10000, got {self.repetition_penalty}",
                "repetition_penalty",
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise InvalidRequestError(
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
            )
        if self.seed is not None and not -_INT64 <= self.seed < _INT64:
            raise InvalidRequestError(f"seed must fit into 64 signed bits, got {self.seed}", "seed")
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _within("n", self.n, 1, MAX_N)
        self._validate_stop(vocab_size)
        self._validate_bias(vocab_size)
        self._validate_bad_words()
        self._validate_allowed(vocab_size)
        if self.structured is not None:
            self.structured.validate()
            if self.structured.temperatures() - {self.temperature}:
                rules = " and ".join(map(str, sorted(self.structured.temperatures())))
                raise InvalidRequestError(
                    f"{self.structured.param}: its rules ask for temperature {rules}, the request for "
                    f"{self.temperature}; an output has one temperature",
                    self.structured.param,
                )

    def with_rule_temperature(self) -> SamplingParams:
        """With the temperature that the rules of a grammar agree upon: for a caller who gives none."""
        temperatures = frozenset() if self.structured is None else self.structured.temperatures()
        return msgspec.structs.replace(self, temperature=min(temperatures)) if len(temperatures) == 1 else self

    def _validate_stop(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequestError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
        if len(self.stop_token_ids) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"at most {MAX_LOGIT_BIAS} stop_token_ids", "stop_token_ids")
        check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")
        if len(self.shown_special_ids) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"at most {MAX_LOGIT_BIAS} shown_special_ids", "shown_special_ids")
        check_token_ids(self.shown_special_ids, vocab_size, "shown_special_ids")

    def _validate_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"at most {MAX_LOGIT_BIAS} entries in logit_bias", "logit_bias")
        check_token_ids(tuple(self.logit_bias), vocab_size, "logit_bias")
        for token_id, bias in self.logit_bias.items():
            if not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} must be in [-100, 100], got {bias}", "logit_bias"
                )

    def _validate_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"at most {MAX_BAD_WORDS} bad_words, got {len(self.bad_words)}", "bad_words")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
                raise InvalidRequestError(
                    f"each of bad_words must have 1 to {MAX_BAD_WORD_LENGTH} characters and more than spaces",
                    "bad_words",
                )

    def _validate_allowed(self, vocab_size: int) -> None:
        ids, name = self.allowed_token_ids, "allowed_token_ids"
        if ids is None:
            return
        if not ids:
            raise InvalidRequestError(f"{name} must hold at least one id", name)
        if len(ids) > vocab_size:
            raise InvalidRequestError(f"{name} holds {len(ids)} ids, more than the vocabulary's {vocab_size}", name)
        check_token_ids(ids, vocab_size, name)
        if self.structured is not None:  # the two might leave nothing in common to go on with
            raise InvalidRequestError(f"{name} cannot be combined with structured output", name)


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", name)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise `InvalidRequestError` unless every id is an int in [0, vocab_size)."""
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} holds {token_id!r}; token ids are integers from 0 to {vocab_size - 1}", param
            )


# gc=False: an answer may hold a million of these, and none is part of a cycle.
class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One candidate at one position. `token` is the id's own text, `logprob` is natural."""

    token_id: int
    token: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """The sampled token's logprob under the raw distribution, and the likeliest candidates'."""

    token_id: int
    token: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True):
    """How likely a token of the prompt was after those before it, and the likeliest candidates there."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top_ids: Sequence[int]
    top: Sequence[float]  # the candidates' logprobs


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request. `completion_tokens` sums over all n choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Fragment(msgspec.Struct, frozen=True):
    """A piece of one choice's output.

    `text` may be empty while bytes of a character or a possible stop string are held back. Every token
    of the output appears in the `token_ids` of exactly one fragment. The last fragment of a choice has
    a `finish_reason`; the last fragment of the request also has `usage`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0  # which of the n choices
    # With a choice's first fragment, where asked for: all of the prompt but its first token.
    prompt_logprobs: Sequence[PromptLogprob] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One finished output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: Sequence[PromptLogprob] | None = None  # of all of the prompt but its first token


class Completion(msgspec.Struct, frozen=True):
    """A finished request. The properties read the first choice; `choices` has all n."""

    id: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of the engine. Counters count since start; the pool's pages add up to `pages_total`."""

    running: int  # sequences that hold a row
    waiting: int  # sequences without a row, those included that are still to fork from another
    pages_total: int  # without the reserved page 0
    pages_used: int  # held by running sequences (shared with the cache or not)
    pages_cached: int  # in the prefix cache and evictable now
    pages_free: int
    page_size: int
    steps: int
    requests: int  # finished, aborted and failed ones included
    prompt_tokens: int
    cached_tokens: int  # prompt tokens served from the prefix cache
    computed_tokens: int  # tokens that went through the model
    generated_tokens: int
    preemptions: int
    last_step_age: float | None  # seconds since the last step was committed; None before the first

    @property
    def kv_usage(self) -> float:
        """Share of the pool's pages that running sequences hold."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the prefix cache, 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


# ---- one step, as the scheduler plans it for the runtime --------------------------------------------------


class NewRow(msgspec.Struct):
    """A device row given to a sequence, effective before the step's forward pass."""

    row: int
    params: SamplingParams
    seed: int  # 64 bits, already derived from (seed, sibling index)
    stop_ids: tuple[int, ...]  # what min_tokens masks: EOS (unless ignored) and stop_token_ids
    prompt_len: int  # the request's own prompt; output positions are counted from here
    tokens: Sequence[int]  # all ids known so far, prompt then output (penalties are rebuilt from them)
    length: int  # tokens whose KV is already in `pages`
    pages: list[int]
    banned: Sequence[Sequence[int]] = ()  # the output must never complete any of these
    # The row that it forks from, which is read to its end in this step: all but the seed is the same, and can be copied
    # on the device. Its whole pages are this row's too; `pages` is empty, and `new_pages` has what comes behind them.
    copy_of: int | None = None


class PrefillChunk(msgspec.Struct):
    """Consecutive known tokens of one row that go through the model in this step."""

    row: int
    start: int  # position of the first one; equals the row's length before the step
    token_ids: Sequence[int]
    samples: bool  # the last chunk draws a token; earlier ones neither sample nor count
    forks: Sequence[int] = ()  # rows of siblings that draw from the same logits (n > 1)
    score_ids: Sequence[int] = ()  # the prompt's next token for each of the first ones: how likely was it?
    top: int = 0  # candidates beside each score


MOST_SHARED_RUNS = 16  # in one step


class SharedRun(msgspec.Struct):
    """Decode rows whose contexts begin with the same tokens, in pages of equal content."""

    members: list[int]  # places in `StepPlan.decode`
    tokens: int  # whole pages, fewer than any member's context


class MixedLimit(msgspec.Struct, frozen=True):
    """Bounds a step with prompt tokens beside decodes: running streams wait for as long as it takes."""

    tokens: int  # decodes and prompt tokens, of which one at position p counts as 1 + p / context
    context: float  # so many keys cost a token as much as everything else does
    multiple: int  # a prompt that is cut is cut where the step has a multiple of so many tokens


class StepPlan(msgspec.Struct):
    """Everything the runtime needs to run one step.

    Order of effect: `new_rows` (copies after what they copy), `new_pages`, forward over `decode` (one token each:
    the one that the row sampled last, still on the device) and `prefill`, draws, then `page_copies`. Draws come back
    in the order: `decode`, then each sampling chunk's row followed by its forks.
    """

    step: int
    new_rows: list[NewRow]
    new_pages: list[tuple[int, int, int]]  # (row, index in the row's page table, page)
    decode: list[int]  # rows
    prefill: list[PrefillChunk]
    page_copies: list[tuple[int, int]]  # (source page, destination page), all layers, after the forward pass
    shared: Sequence[SharedRun] = ()  # disjoint; a hint that spares reading, never a condition
    structured: bool = False  # some draw has a grammar: the draws wait for its mask, which needs the tokens before

    @property
    def sampled_rows(self) -> list[int]:
        """The rows that draw, in the order of the results."""
        rows = list(self.decode)
        for chunk in self.prefill:
            if chunk.samples:
                rows.append(chunk.row)
                rows.extend(chunk.forks)
        return rows

    @property
    def scoring(self) -> bool:
        """Whether a chunk has prompt logprobs to compute."""
        return any(chunk.score_ids for chunk in self.prefill)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.decode) + sum(len(chunk.token_ids) for chunk in self.prefill)


class RowLogprobs(msgspec.Struct):
    """Logprobs of one draw under the raw distribution, likeliest first."""

    sampled: float
    top_ids: list[int]
    top: list[float]


class StepResult(msgspec.Struct):
    """What a step drew, one entry per row of `StepPlan.sampled_rows`, in that order."""

    token_ids: list[int]
    finite: list[bool]  # False: the row's logits held NaN or +infinity; its token id means nothing
    logprobs: list[RowLogprobs | None] | None  # None when no row asked for them
    scores: Sequence[Sequence[PromptLogprob]] = ()  # a list for each chunk with `score_ids`, in the plan's order
    finite_chunks: Sequence[bool] = ()  # for each chunk, whether what it wrote into its pages is finite; (): all of it
