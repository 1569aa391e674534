"""Python literals become JSON of the same value, wherever they are cut."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.text.answer.formats.values.python_literal import LiteralReader
from tests.text.cutting import cuts


def read(*fragments: str) -> tuple[str, bool]:
    """Return the JSON, and whether the literal is complete."""
    reader, made = LiteralReader(), []
    for fragment in fragments:
        taken = reader.feed(fragment)
        made.append(reader.take())
        if taken < len(fragment):
            break
    reader.end()
    return "".join([*made, reader.take()]), reader.done


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(data=st.data(), value=values)
def test_what_python_writes(data: st.DataObject, value: object) -> None:
    written = repr(value)
    made, done = read(*data.draw(cuts(written)))
    assert done
    assert json.loads(made) == value


@given(data=st.data(), value=values)
def test_json_is_read_as_well(data: st.DataObject, value: object) -> None:
    made, done = read(*data.draw(cuts(json.dumps(value))))
    assert done
    assert json.loads(made) == value


@pytest.mark.parametrize(
    "written",
    [
        r"'\x41\u00e9\U0001F600\101\0'",
        r'"it\'s \\ \n\t\a\
here"',
        "(1, 2,)",
        "[-1, +2, .5, 1., 1_000, 0x1f, 1e3]",
        "{'a': (True, None), 'b': {}, 'c': []}",
        "''",
    ],
)
def test_what_people_write(written: str) -> None:
    made, done = read(*written)
    value = ast.literal_eval(written)
    assert done
    assert json.loads(made) == json.loads(json.dumps(value))


def test_numbers_as_keys_become_strings() -> None:
    assert read("{1: 2, None: 3}") == ('{"1": 2, "None": 3}', True)


@pytest.mark.parametrize("written", ["foo", "[1 2]", "{'a'}", "{'a' 1}", "[,]", "inf", "nan", "f(1)", "1 + 1", "[1}"])
def test_what_is_no_literal_is_not_complete(written: str) -> None:
    made, done = read(*written)
    assert not done or made == "1"
