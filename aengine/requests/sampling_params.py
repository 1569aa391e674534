"""How a request's tokens are drawn and when it stops: the parameters, and the ranges that they are checked against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from aengine.errors import InvalidRequestError
from aengine.requests.structured import Structured

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
    stop_in_thought: bool = False  # a stop string ends a chat's answer within the thought before it, too
    # If the output begins with the first text, no stop string counts before the end of the second.
    unstopped: tuple[str, str] | None = None
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
        if self.unstopped is not None and not all(len(text) <= MAX_STOP_LENGTH for text in self.unstopped):
            raise InvalidRequestError(f"unstopped: at most {MAX_STOP_LENGTH} characters each", "unstopped")
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
