"""Arguments that a model writes become valid JSON, in linear time."""

from __future__ import annotations

import json
import time

from aengine.text.answer.formats.values.json_arguments import JsonArguments


def test_half_of_a_surrogate_pair_in_a_text_of_json_stays_an_escape() -> None:
    arguments = JsonArguments()
    arguments.feed(r'"{\"a\": \"\ud800\", \"\udfff\": \"\ud83d\ude00\"}"')
    assert arguments.done
    written = arguments.take()
    assert written.encode() == r'{"a": "\ud800", "\udfff": "😀"}'.encode()
    assert json.loads(written) == {"a": "\ud800", "\udfff": "😀"}


def test_time_is_linear_in_what_is_open() -> None:
    begin = time.process_time()
    arguments = JsonArguments()
    arguments.feed('{"a":' * 20_000 + "[" + "[]," * 20_000)
    arguments.close()
    assert time.process_time() - begin < 1.5  # quadratic time is 5 s
