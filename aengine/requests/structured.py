"""`Structured`: the form that a request's output must match."""

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
    """The form of an output; exactly one of `json` to `grammar` is given.

    The output ends where its language does: `ignore_eos` has no say, and `min_tokens` only where the language leaves
    a choice. A stop string or stop token id still ends it earlier.

    A model may think before: with `thought` "possible" all up to `</think>` is free, if the output begins with
    `<think>`; with "open" it is in any case, because the prompt has opened the thought.
    """

    json: Mapping[str, Any] | str | None = None  # a JSON schema, as an object or as its text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # matched against the whole output
    choice: tuple[str, ...] | None = None  # one of these texts
    grammar: str | None = None  # in Lark's notation, as llguidance reads it; `start` is the start rule
    strict: bool = False  # of `json`: a format that is not known, and that items differ, is refused, not passed over
    thought: Thought = "never"
    calls: str | None = None  # rules in Lark's notation; what their rule `calls` describes may take the form's place
    origin: str | None = None  # the name of the request's field, for errors

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
        """What the rules of a grammar say of the temperature, as in `a[temperature=0.7]: /.*/`.

        Raises `InvalidRequestError` for what is not a number.
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
        """Raise `InvalidRequestError`, naming the field, unless one is given and of its type."""
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
