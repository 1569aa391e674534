"""`Structured`: the form that a request's output must have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from aengine.errors import InvalidRequestError

Thought = Literal["never", "possible", "open"]
LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')  # strings and regexes of a Lark grammar
_RULE_ATTRIBUTES = re.compile(r"^[ \t]*[\w.-]+\[([^]\n]*)\][ \t]*:", re.MULTILINE)
_TEMPERATURE = re.compile(r"\btemperature[ \t]*=[ \t]*([0-9.]+(?:[eE][+-]?[0-9]+)?)")
KINDS = ("json", "json_object", "regex", "choice", "grammar")


class Structured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The required form of an output. Exactly one of the fields `json` to `grammar` must be set.

    The output ends when the form is complete: `ignore_eos` has no effect, and `min_tokens` only if the form allows more
    tokens. A stop string or stop token id can end it earlier.

    thought: a model may think before its output. With "possible", text up to `</think>` is free if the output begins
    with `<think>`. With "open" it is always free, because the prompt has opened the thought.
    """

    json: Mapping[str, Any] | str | None = None  # a JSON schema, as an object or as its text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # matched against the whole output
    choice: tuple[str, ...] | None = None  # exactly one of these texts
    grammar: str | None = None  # in llguidance's variant of Lark; the start rule is `start`
    strict: bool = False  # for `json`: refuse unknown formats and `uniqueItems` instead of ignoring them
    thought: Thought = "never"
    calls: str | None = None  # Lark rules; the output may match their rule `calls` instead of the form
    origin: str | None = None  # name of the request's field, for errors

    @property
    def kind(self) -> str:
        """The name of the form's field."""
        return self._given()[0]

    @property
    def param(self) -> str:
        """The name of the field in errors."""
        given = self._given()
        return self.origin or (f"structured.{given[0]}" if len(given) == 1 else "structured")

    def temperatures(self) -> frozenset[float]:
        """Return the temperatures in a grammar's rules, as in `a[temperature=0.7]: /.*/`.

        Raises `InvalidRequestError` if one is not a number.
        """
        if not isinstance(self.grammar, str):
            return frozenset()
        attributes = _RULE_ATTRIBUTES.findall(LARK_TEXT.sub("_", self.grammar))
        found = [value for each in attributes for value in _TEMPERATURE.findall(each)]
        try:
            return frozenset(map(float, found))
        except ValueError as error:
            raise InvalidRequestError(f"{self.param}: {error}", self.param) from None

    def validate(self) -> None:
        """Raise `InvalidRequestError`, naming the field, unless exactly one form is given and has its type."""
        given = self._given()
        if len(given) != 1:
            raise InvalidRequestError(
                f"{self.param} takes exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}", self.param
            )
        if self.thought not in get_args(Thought):
            raise InvalidRequestError(
                f"{self.param}: thought must be one of {', '.join(get_args(Thought))}, got {self.thought!r}", self.param
            )
        value = getattr(self, given[0])
        match given[0]:
            case "json":
                good, wanted = isinstance(value, (Mapping, str)), "a JSON schema: an object, or its text"
            case "json_object":
                good, wanted = value is True, "true or false"
            case "choice":
                good = (
                    isinstance(value, tuple) and all(isinstance(text, str) and text for text in value) and value != ()
                )
                wanted = "a list of texts that are not empty"
            case _:
                good, wanted = isinstance(value, str) and value != "", "text that is not empty"
        if not good:
            raise InvalidRequestError(f"{self.param} must be {wanted}", self.param)

    def _given(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
