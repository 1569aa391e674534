"""What a request may ask of its output's form."""

from __future__ import annotations

import pytest

from aengine.errors import InvalidRequestError
from aengine.structured import Structured
from aengine.types import SamplingParams


@pytest.mark.parametrize(
    "structured",
    [
        Structured(json={"type": "object"}),
        Structured(json='{"type": "object"}'),
        Structured(json_object=True),
        Structured(regex="a+"),
        Structured(choice=("yes", "no")),
        Structured(grammar='start: "a"'),
        Structured(regex="a+", thought="open"),
    ],
)
def test_one_kind_is_enough(structured: Structured) -> None:
    SamplingParams(structured=structured).validate(10)


@pytest.mark.parametrize(
    ("structured", "param", "words"),
    [
        (Structured(), "structured", "exactly one of json, json_object, regex, choice, grammar, got none"),
        (Structured(regex="a", choice=("b",)), "structured", "got regex and choice"),
        (Structured(json=5), "structured.json", "a JSON schema"),  # type: ignore[arg-type]
        (Structured(json_object=1), "structured.json_object", "true or false"),  # type: ignore[arg-type]
        (Structured(regex=b"a"), "structured.regex", "text"),  # type: ignore[arg-type]
        (Structured(regex=""), "structured.regex", "not empty"),
        (Structured(choice=()), "structured.choice", "a list of texts"),
        (Structured(choice=("a", "")), "structured.choice", "not empty"),
        (Structured(choice=("a", 1)), "structured.choice", "a list of texts"),  # type: ignore[arg-type]
        (Structured(grammar=""), "structured.grammar", "not empty"),
        (Structured(regex="a", thought="maybe"), "structured.regex", "one of never, possible, open"),  # type: ignore[arg-type]
        (Structured(regex="", origin="guided_regex"), "guided_regex", "not empty"),
    ],
)
def test_anything_else_is_refused_by_name(structured: Structured, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(structured=structured).validate(10)
    assert caught.value.param == param
    assert param in str(caught.value)
