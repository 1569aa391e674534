"""The text in a custom tool's arguments, decoded while the model writes it."""

from __future__ import annotations

import json
from itertools import pairwise
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.http.responses.custom_input import CustomInput


def decode(arguments: str, *cuts: int) -> str:
    reader = CustomInput()
    ends = [0, *sorted(cuts), len(arguments)]
    return "".join(reader.feed(arguments[begin:end]) for begin, end in pairwise(ends)) + reader.finish()


@pytest.mark.hypothesis
@given(st.data(), st.text(), st.booleans())
def test_any_text_in_any_pieces_is_decoded(data: st.DataObject, text: str, plain: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=plain, indent=data.draw(st.sampled_from([None, 1])))
    cuts = data.draw(st.lists(st.integers(0, len(arguments)), max_size=8))
    assert decode(arguments, *cuts) == text


@pytest.mark.hypothesis
@given(st.data(), st.text(alphabet='\\u"dDeE89aA0nx{} :input\n'))
def test_any_pieces_give_the_same_input(data: st.DataObject, rest: str) -> None:
    arguments = data.draw(st.sampled_from(['{"input": "', "{", ""])) + rest
    cuts = data.draw(st.lists(st.integers(0, len(arguments)), max_size=8))
    assert decode(arguments, *cuts) == decode(arguments)
    decode(arguments).encode()  # no lone surrogates


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a', "a"),  # cut short
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ("{}", ""),
        ("", ""),
        ('{"input": 3}', '{"input": 3}'),  # arguments in another form are the input unchanged
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": "a", "more": "b"}', "a"),
        ('{"input": "\\ud800"}', "\ufffd"),
        ('{"input": "\\ud83d\\u0061"}', "\ufffda"),
        ('{"input": "\\q"}', "\\q"),
        ('{"input": "a\nb"}', "a\nb"),
    ],
)
def test_arguments_that_are_no_such_object(arguments: str, text: str) -> None:
    assert decode(arguments) == text
    assert decode(arguments, *range(len(arguments))) == text


@pytest.mark.alone
def test_time_is_linear_in_the_text() -> None:
    for text in ("a" * 400_000, "\\u0061" * 80_000, "\\u" * 200_000, "\\ud83d" * 80_000):
        reader, begin = CustomInput(), perf_counter()
        reader.feed('{"input": "')
        for at in range(0, len(text), 4):
            reader.feed(text[at : at + 4])
        assert perf_counter() - begin < 5
