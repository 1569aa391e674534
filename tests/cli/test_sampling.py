"""Sampling parameters as text."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.cli.errors import UsageError
from aengine.cli.sampling import parse_parameter


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("temperature", "1", 1.0),
        ("max_tokens", "20", 20),
        ("max_tokens", "none", None),
        ("ignore_eos", "true", True),
        ("ignore_eos", "false", False),
        ("stop", "END", ("END",)),
        ("stop", '"\\n"', ("\n",)),
        ("stop", '["a", "b"]', ("a", "b")),
        ("stop", "none", ()),
        ("stop_token_ids", "[1, 2]", (1, 2)),
        ("logit_bias", '{"5": -1}', {5: -1.0}),
        ("structured", '{"regex": "a"}', {"regex": "a"}),
        ("structured", "none", None),
    ],
)
def test_a_value(name: str, text: str, value: Any) -> None:
    assert parse_parameter(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "warm"),
        ("temperature", "none"),
        ("max_tokens", "2.5"),
        ("top_k", "-2"),
        ("stop", "[1]"),
        ("stop", "[1"),
        ("structured", "regex"),
        ("heat", "1"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        parse_parameter(name, text)


def test_the_error_repeats_the_text_once() -> None:
    with pytest.raises(UsageError, match=r"^stop_token_ids: Expected `array`, got 'abc'$"):
        parse_parameter("stop_token_ids", "abc")
