"""The forms that a request may require of its output."""

from __future__ import annotations

import pytest

from aengine.engine.requests.arguments import resolved_params
from aengine.errors import InvalidRequestError
from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured


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


@pytest.mark.parametrize(
    ("grammar", "temperatures"),
    [
        ("start: a\na[capture, temperature=0, max_tokens=20]: /.*/", {0.0}),
        ('start: a b\na[temperature=0.5]: /a/\n  b[stop="]", temperature = 5e-1]: /b/', {0.5}),
        ("start: a b\na[temperature=0]: /a/\nb[temperature=1.5]: /b/", {0.0, 1.5}),
        ('start: "a[temperature=1]: " /[temperature=2]:/', set()),
        ("start: /a/", set()),
    ],
)
def test_rules_may_say_a_temperature(grammar: str, temperatures: set[float]) -> None:
    assert Structured(grammar=grammar).temperatures() == temperatures


def test_which_is_the_requests_where_it_says_none() -> None:
    form = Structured(grammar="start[temperature=0.5]: /a/")
    assert resolved_params(SamplingParams(), None, {"structured": form}, 10).temperature == 0.5
    assert resolved_params(SamplingParams(), None, {"structured": form, "temperature": 0.5}, 10).temperature == 0.5


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start[temperature=0.5]: /a/", "its rules ask for temperature 0.5, the request for 1.0"),
        ("start: a b\na[temperature=0]: /a/\nb[temperature=1]: /b/", "temperature 0.0 and 1.0, the request for 1.0"),
        ("start[temperature=1.2.3]: /a/", "could not convert"),
    ],
)
def test_and_never_passed_over(grammar: str, words: str) -> None:
    params = SamplingParams(structured=Structured(grammar=grammar), temperature=1.0)
    with pytest.raises(InvalidRequestError, match=words) as caught:
        params.validate(10)
    assert caught.value.param == "structured.grammar"
