"""Sampling parameters: how a request's tokens are drawn and when it stops.

`SamplingParams` alone defines the meaning and the range of each parameter. The command line and the client derive
their parameters from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, NamedTuple, get_args, get_type_hints

import msgspec

from aengine.errors import InvalidRequestError
from aengine.requests.structured import Structured

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters; bounds the text that a stream holds back
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 128  # characters
_INT64 = 2**63


class Parameter(NamedTuple):
    """The help text and the range of one sampling parameter."""

    help: str
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf  # like `low`, but the bound itself is not allowed
    is_internal: bool = False  # only for aengine itself; help and errors do not show it

    @property
    def range(self) -> str:
        """The range in words; empty if every value is allowed."""
        if self.above != -math.inf:
            return f"above {self.above} and at most {self.high}"
        if self.high != math.inf:
            return f"between {self.low} and {self.high}"
        return "" if self.low == -math.inf else f"at least {self.low}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to draw tokens and when to stop. Ranges are checked by `validate`, not at construction.

    The order of the steps is logit_bias, repetition/presence/frequency penalty, masks, temperature,
    top_k, top_p, min_p, draw.
    """

    max_tokens: Annotated[
        int | None, Parameter("most tokens of an output; default: until the context is full", low=1)
    ] = None
    min_tokens: Annotated[
        int, Parameter("least tokens; before them, neither the end-of-sequence token nor a stop id is drawn", low=0)
    ] = 0
    temperature: Annotated[
        float,
        Parameter(
            "how varied the draws are; 0: always the likeliest token; default: what the checkpoint recommends",
            low=0,
            high=2,
        ),
    ] = 1.0
    top_k: Annotated[int, Parameter("draw among this many of the likeliest tokens; 0 or -1: among all", low=-1)] = 0
    top_p: Annotated[
        float, Parameter("draw among the likeliest tokens that together have this probability", above=0, high=1)
    ] = 1.0
    min_p: Annotated[
        float, Parameter("draw among tokens with at least this share of the likeliest one's probability", 0, 1)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            "above 1: makes tokens of the prompt and the output less likely, as Hugging Face defines it",
            above=0,
            high=10_000,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Parameter("above 0: makes tokens of the output less likely, as OpenAI defines it", low=-2, high=2)
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "above 0: makes tokens less likely by their count in the output, as OpenAI defines it", low=-2, high=2
        ),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float], Parameter('numbers from -100 to 100 that are added to the logits of token ids: {"42": -5}')
    ] = {}
    seed: Annotated[
        int | None,
        Parameter(
            "the same seed gives the same draws; default: a new one for each request", low=-_INT64, high=_INT64 - 1
        ),
    ] = None
    stop: Annotated[tuple[str, ...], Parameter('text that ends an output, or a list: ["\\n", "END"]')] = ()
    stop_in_thought: Annotated[
        bool, Parameter("whether stop strings also end a chat's answer within the thought before it")
    ] = False
    unstopped: Annotated[
        tuple[str, ...] | None,
        Parameter(
            "if the output begins with the first text, stop strings only count after the second text; if a third text "
            "follows, after the next second text, and so on",
            is_internal=True,
        ),
    ] = None
    stop_token_ids: Annotated[tuple[int, ...], Parameter("token ids that end an output: [7, 8]")] = ()
    bad_words: Annotated[
        tuple[str, ...], Parameter('texts whose token sequences are never drawn, with or without a space before: ["x"]')
    ] = ()
    allowed_token_ids: Annotated[
        tuple[int, ...] | None,
        Parameter(
            "the only token ids that are drawn: [7, 8]; without an end-of-sequence id only max_tokens ends the output"
        ),
    ] = None
    include_stop: Annotated[bool, Parameter("keep the stop string, or the stop token's text, in the text")] = False
    ignore_eos: Annotated[bool, Parameter("continue after the end-of-sequence token")] = False
    skip_special_tokens: Annotated[bool, Parameter("leave special tokens out of the text")] = True
    shown_special_ids: Annotated[
        tuple[int, ...], Parameter("special tokens that stay in the text even so", is_internal=True)
    ] = ()
    logprobs: Annotated[
        int | None, Parameter("log-probabilities of the tokens, and of this many likeliest ones", 0, MAX_LOGPROBS)
    ] = None
    prompt_logprobs: Annotated[int | None, Parameter("like logprobs, for the prompt's tokens", 0, MAX_LOGPROBS)] = None
    n: Annotated[int, Parameter("outputs for each prompt", 1, MAX_N)] = 1
    speculation: Annotated[bool, Parameter("draft tokens ahead for this request, if the engine drafts at all")] = True
    structured: Annotated[
        Structured | None,
        Parameter('what the output must match: {"regex": "yes|no"}, or json, json_object, choice, grammar'),
    ] = None

    @property
    def penalized(self) -> bool:
        """Whether any penalty needs token counts."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in its range."""
        for name, kinds, low, high, above in _NUMBERS:
            value = getattr(self, name)
            kind = type(value)
            if kind not in kinds or (value is not None and not (low <= value <= high and value > above)):
                check_number(name, value)
        for name in _SWITCHES:
            if type(value := getattr(self, name)) is not bool:
                raise InvalidRequestError(f"{name} must be true or false, got {value!r}", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
            )
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
        """Return parameters with the temperature of a grammar's rules, for a caller that gives none."""
        temperatures = frozenset() if self.structured is None else self.structured.temperatures()
        return msgspec.structs.replace(self, temperature=min(temperatures)) if len(temperatures) == 1 else self

    def _validate_stop(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequestError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
        if self.unstopped is not None and len(self.unstopped) not in (2, 3):
            raise InvalidRequestError(f"unstopped: two or three texts, got {len(self.unstopped)}", "unstopped")
        if self.unstopped is not None and not all(len(text) <= MAX_STOP_LENGTH for text in self.unstopped):
            raise InvalidRequestError(f"unstopped: at most {MAX_STOP_LENGTH} characters each", "unstopped")
        for ids, name in (
            (self.stop_token_ids, "stop_token_ids"),
            (self.shown_special_ids, "shown_special_ids"),
        ):
            if len(ids) > MAX_LOGIT_BIAS:
                raise InvalidRequestError(f"at most {MAX_LOGIT_BIAS} {name}", name)
            check_token_ids(ids, vocab_size, name)

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
        if self.structured is not None:  # the two might allow no common token
            raise InvalidRequestError(f"{name} cannot be combined with structured output", name)


def check_number(name: str, value: object) -> None:
    """Raise `InvalidRequestError` unless the value is a number in its range. Subclasses of int and float are fine."""
    is_float = any(float in kinds for other, kinds, *_ in _NUMBERS if other == name)
    is_finite = not isinstance(value, float) or math.isfinite(value)  # a large int fits no float
    if not isinstance(value, (int, float) if is_float else int) or isinstance(value, bool) or not is_finite:
        kind = "a finite number" if is_float else "an integer"
        raise InvalidRequestError(f"{name} must be {kind}, got {value!r}", name)
    parameter = PARAMETERS[name]
    if not (parameter.low <= value <= parameter.high and value > parameter.above):
        raise InvalidRequestError(f"{name} must be {parameter.range}, got {value}", name)


_Number = tuple[str, frozenset[type], float, float, float]  # name, types, lowest, highest, and the excluded bound


def _parameters() -> tuple[dict[str, Parameter], list[_Number], list[str]]:
    """Return every parameter by name, the ranges of those that are numbers, and the names of those that are bools."""
    parameters: dict[str, Parameter] = {}
    numbers: list[_Number] = []
    switches: list[str] = []
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        kind, parameter = get_args(hint)
        kinds = set(get_args(kind) if isinstance(kind, UnionType) else (kind,))
        parameters[name] = parameter
        if kinds & {int, float}:
            numbers.append((name, frozenset(kinds | {int}), parameter.low, parameter.high, parameter.above))
        elif kind is bool:
            switches.append(name)
    return parameters, numbers, switches


PARAMETERS, _NUMBERS, _SWITCHES = _parameters()
NAMES = tuple(name for name, parameter in PARAMETERS.items() if not parameter.is_internal)


def unknown_parameter(name: str, meant: str | None = None) -> InvalidRequestError:
    """Return the error for a parameter that does not exist.

    meant: the argument that was probably meant. None: the parameter with the most similar name, if there is one.
    """
    close = get_close_matches(name, NAMES, 1) if meant is None else [meant]
    hint = f" (did you mean {close[0]}?)" if close else ""
    return InvalidRequestError(f"unknown parameter {name!r}{hint}; known are {', '.join(NAMES)}", name)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise `InvalidRequestError` unless every id is an int in [0, vocab_size)."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return  # these checks run in C; a Python loop over a long prompt would hold the event loop for 15 ms
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} holds {token_id!r}; token ids are integers from 0 to {vocab_size - 1}", param
            )
