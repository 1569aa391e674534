"""Every field of every request with every kind of JSON that it may not be, and with text that is none."""

from __future__ import annotations

import pytest

from tests.reliability.bad_input.fields import BODIES, ONE_OF_ALL, fields
from tests.reliability.bad_input.hostile import Hostile

SAMPLES = {
    "null": ["null"],
    "bool": ["true", "false"],
    "int": ["1"],
    "float": ["1.5"],
    "str": ['"1"', '""', '"true"'],
    "array": ["[]", '["a"]'],
    "object": ["{}", '{"a": 1}'],
}
BROKEN = {  # text that is no text
    rb'"\ud800"': "Unicode",
    rb'"a\udfff b"': "Unicode",
    rb'"\ud83d\ud83d"': "Unicode",
    b'"\xff"': "Unicode",
    b'"\xc3("': "Unicode",
    b'"\xed\xa0\x80"': "Unicode",
    b'"\xf8\x88\x80\x80\x80"': "Unicode",
    b'"caf\xe9"': "Unicode",
}


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ONE_OF_ALL)
def test_every_field_with_every_wrong_kind(hostile: Hostile, endpoint: str) -> None:
    tried = 0
    for field in fields(endpoint):
        for kind, texts in SAMPLES.items():
            if kind in field.kinds or (kind == "int" and "float" in field.kinds):
                continue
            for text in texts:
                got = "" if field.tells else f", got `{kind}`"
                hostile.refused(endpoint, field.body(text), field.name, rf"Expected `.*`{got}")
                tried += 1
    assert tried > 250


@pytest.mark.parametrize("endpoint", ONE_OF_ALL)
def test_every_text_with_what_is_no_text(hostile: Hostile, endpoint: str) -> None:
    tried = 0
    for field in fields(endpoint):
        if "str" in field.kinds:
            for text, words in BROKEN.items():
                hostile.refused(endpoint, field.body(text), field.name, words)
            tried += 1
    assert tried >= 20


@pytest.mark.parametrize("endpoint", BODIES)
def test_characters_that_are_only_odd_are_text(hostile: Hostile, endpoint: str) -> None:
    """NUL, a byte order mark, right-to-left marks, a pair of surrogates, unassigned and private characters."""
    odd = r'"\u0000\ufeff\u202e\ud83d\ude00\uffff\udbff\udfff"'
    for field in fields(endpoint):
        if field.name in ("prompt", "messages[0].content", "stop", "stop[0]", "user", "cache_salt"):
            response = hostile.post(endpoint, field.body(odd))
            assert response.status_code == 200, f"{field.name}: {response.text}"
