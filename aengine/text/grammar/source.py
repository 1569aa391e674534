"""Translates a requested form to the text of a grammar, within the bounds that a compiler needs."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from aengine.errors import InvalidRequestError
from aengine.requests.structured import LARK_TEXT, Structured
from aengine.text.answer.lark import PLACED, literal
from aengine.text.answer.parser import AnswerFormat
from aengine.text.grammar.calls import thought_rules
from aengine.text.grammar.harmony import harmony_final, harmony_thoughts
from aengine.text.grammar.matcher import LLMatcher
from aengine.text.grammar.schemas import bounded_numbers, compilable_schema

MAX_DIVISOR = 20_000  # `multipleOf` becomes an automaton with that many states before any limit applies
MAX_INTERSECTIONS = 8  # of a Lark grammar; each may multiply the compile time, in spite of the library's limits
# the line with which guidance begins its grammars
_NO_OPTIONS = re.compile(r"^[ \t]*%llguidance[ \t]*\{[ \t]*\}[ \t]*$", re.MULTILINE)

# Between two tokens of JSON: nothing, a space, or a line break with its indentation. The indentation is bounded, or a
# model that repeats white space would never end. A schema may not switch off errors about unknown keywords, nor make
# oneOf mean anyOf.
_JSON_OPTIONS = {"whitespace_pattern": r" |\r?\n[ \t]{0,20}", "lenient": False, "coerce_one_of": False}

# An output may use other tokens for its text than the tokenizer would. So the compiler needs only the vocabulary.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class GrammarLimits(NamedTuple):
    """Bounds on one grammar. characters: of its text; for a schema given as an object, about those of its JSON."""

    characters: int = 131_072
    nesting: int = 64  # objects and lists within each other in a schema
    seconds: float = 5.0  # to compile


def grammar_source(structured: Structured, limits: GrammarLimits, answers: AnswerFormat | None = None) -> str:
    """Return the grammar as llguidance reads it: in Lark's notation, or as JSON with two such grammars.

    answers: how the model writes thoughts and calls. Raises `InvalidRequestError`, naming the field, if a bound is
    exceeded.
    """
    try:
        source = _source(structured, limits) + _OPTIONS
        source.encode()
        if structured.thought != "never" or structured.calls is not None:
            source = _with_thought_and_calls(structured, source, limits, answers or AnswerFormat())
    except InvalidRequestError:
        raise
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{structured.param} holds a lone surrogate", structured.param) from None
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(f"{structured.param}: {error}", structured.param) from None
    return source


def _source(structured: Structured, limits: GrammarLimits) -> str:
    match structured.kind:
        case "json_object":
            return _json_source({"type": "object"})
        case "json":
            schema = compilable_schema(_schema(structured.json, limits), structured.param, strict=structured.strict)
            return _json_source(schema)
        case "regex":
            regex = structured.regex or ""
            _check_length(len(regex), limits)
            (grammar,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
            return str(grammar["lark_grammar"])
        case "choice":
            choices = structured.choice or ()
            _check_length(sum(map(len, choices)), limits)
            return "start: " + " | ".join(literal(text) for text in choices)
        case _:
            return _lark_source(structured.grammar or "", limits)


def _with_thought_and_calls(structured: Structured, source: str, limits: GrammarLimits, answers: AnswerFormat) -> str:
    """Return the grammar of the requested form, with a thought before it or calls in its place."""
    if answers.harmony:
        head, rules = harmony_thoughts(answers.markers)
        form = f"{harmony_final(answers.markers)} @answer"
    else:
        head, rules = thought_rules(structured.thought, answers.markers, answers.thought_markers)
        form = "@answer"
    start = f"start: {head}{form}"
    if structured.calls is not None:
        start = f"start: {head}(calls | {form})\n{_lark_source(structured.calls, limits)}"
    whole = "\n".join([start, *rules]) + _OPTIONS
    grammars = [{"name": "whole", "lark_grammar": whole}, {"name": "answer", "lark_grammar": source}]
    return json.dumps({"grammars": grammars})


def _json_source(schema: dict[str, Any]) -> str:
    return "start: %json " + msgspec.json.encode({**bounded_numbers(schema), "x-guidance": _JSON_OPTIONS}).decode()


def _schema(schema: Mapping[str, Any] | str | None, limits: GrammarLimits) -> dict[str, Any]:
    if isinstance(schema, str):
        _check_length(len(schema), limits)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
    if isinstance(schema, Mapping) and not isinstance(schema, dict):
        schema = dict(schema)
    if not isinstance(schema, dict):
        raise ValueError("the schema must be an object")
    _check_json(schema, limits)
    return schema


def _lark_source(grammar: str, limits: GrammarLimits) -> str:
    _check_length(len(grammar), limits)
    grammar = _NO_OPTIONS.sub("", grammar)
    if re.search(r"^\s*%llguidance", grammar, re.MULTILINE):
        raise ValueError("%llguidance options cannot be set")
    if LARK_TEXT.sub("", grammar).count("&") > MAX_INTERSECTIONS:
        raise ValueError(f"it has more than {MAX_INTERSECTIONS} intersections (&)")
    texts_blank = LARK_TEXT.sub(lambda text: "_" * len(text.group()), grammar)
    for schema in re.finditer(r"%json\s*", grammar):
        try:
            value, end = json.JSONDecoder().raw_decode(grammar, schema.end())
        except (ValueError, RecursionError):
            if not texts_blank.startswith("%json", schema.start()):
                continue  # a text mentions it, for example a tool's description
            raise ValueError("%json must be followed by a JSON schema") from None
        try:
            _check_json(value, limits)
        except ValueError as error:
            if (place := PLACED.match(grammar, end)) is not None:
                raise InvalidRequestError(f"{place[1]}: {error}", place[1]) from None
            raise
    return grammar


def _check_length(characters: int, limits: GrammarLimits) -> None:
    if characters > limits.characters:
        raise ValueError(f"it has {characters} characters, at most {limits.characters} are compiled")


def _check_json(value: object, limits: GrammarLimits) -> None:
    """Walk a schema without recursion and within its bounds. Raises ValueError."""
    left = limits.characters
    level = [value]
    for depth in itertools.count():
        below: list[object] = []
        for item in level:
            left -= 2
            if depth == limits.nesting and isinstance(item, (dict, list, tuple)):
                raise ValueError(f"the schema is nested deeper than {limits.nesting} levels")
            if isinstance(item, str):
                left -= len(item)
            elif isinstance(item, dict):
                _check_divisor(item.get("multipleOf"))
                if not all(isinstance(key, str) for key in item):
                    raise ValueError("the schema has a key that is not text")
                left -= sum(len(key) + 3 for key in item)
                below.extend(item.values())
            elif isinstance(item, (list, tuple)):
                below.extend(item)
            elif item is not None and not isinstance(item, (bool, int, float)):
                raise ValueError(f"the schema holds a {type(item).__name__}, which JSON does not have")
            elif isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"the schema holds {item}, which JSON does not have")
            if left < 0:
                raise ValueError(f"the schema has more than {limits.characters} characters")
        if not below:
            return
        level = below


def _check_divisor(value: object) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        digits = Decimal(str(value)).normalize()
        exponent = digits.as_tuple().exponent
        scaled = digits.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else digits
        if abs(scaled) > MAX_DIVISOR:
            raise ValueError(
                f"multipleOf {value} needs too many states; without its decimal point it may be at most {MAX_DIVISOR}"
            )
