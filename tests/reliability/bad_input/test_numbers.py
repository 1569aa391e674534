"""Every number that a request may hold, and every number that JSON can write and some that it cannot."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.reliability.bad_input.fields import BODIES, ONE_OF_ALL, fields
from tests.reliability.bad_input.hostile import Hostile

GENERATE = next(iter(BODIES))
GOOGOLS = "1" + "0" * 400
HOSTILE = [
    "-1",
    GOOGOLS,
    f"-{GOOGOLS}",
    str(2**64),
    str(-(2**64)),
    "1e999",
    "-1e999",
    "1" + "0" * 4290,
    "1" + "0" * 4301,
]
NO_NUMBERS = ["NaN", "Infinity", "-Infinity"]
BEYOND = r"Expected `int` [<>]=|out of range"  # the parser's words


class Number(NamedTuple):
    """Accepted numbers, refused numbers in addition to the hostile ones, and the words of a refusal."""

    good: list[str]
    bad: list[str]
    words: str


LOGPROBS = Number(["0", "20"], ["21"], "between 0 and 20")
PENALTY = Number(["-2", "-1", "2", "-0.0"], ["-2.1", "2.1"], "between -2 and 2")
TOKEN = Number(["0", "4095"], ["4096"], "from 0 to 4095")
CONTEXT = Number(["1", "200", "256", "1000000", str(2**63 - 1)], ["0"], "at least 1")  # it is cut to the context
UNCUT = Number(["1", "200"], ["0", "256", "1000000"], "at least 1|maximum context length is 256 tokens")
CONTEXT_WORDS = "This model's maximum context length is 256 tokens. "
INT64 = Number(["-1", "0", str(2**63 - 1), str(-(2**63))], [str(2**63)], BEYOND)

# By the field's path; checked below to be all that the structs have.
NUMBERS = {
    "max_tokens": CONTEXT,
    "max_completion_tokens": CONTEXT,
    "min_tokens": Number(["0", "1"], ["2"], "between 0 and max_tokens|at least 0"),
    "temperature": Number(["0", "2", "-0.0", "1e-300"], ["2.1", "-0.1"], "between 0 and 2"),
    "top_k": Number(["-1", "0", "1", "100000"], ["-2"], "-1 or 0|at least -1"),
    "top_p": Number(["1e-300", "1"], ["0", "1.1", "-0.0"], "above 0 and at most 1"),
    "min_p": Number(["0", "1", "-0.0"], ["1.1"], "between 0 and 1"),
    "repetition_penalty": Number(["1e-3", "10000"], ["0", "10001", "-0.0"], "above 0 and at most 10000"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "logit_bias": Number(["-100", "-1", "100"], ["100.5", "-101"], r"in \[-100, 100]"),
    "seed": INT64,
    "priority": INT64,
    "stop_token_ids[0]": TOKEN,
    "shown_special_ids[0]": TOKEN,
    "allowed_token_ids[0]": TOKEN,
    "prompt[0]": TOKEN,
    "prompt[0][0]": TOKEN,
    "input_ids[0]": TOKEN,
    "n": Number(["1", "3"], ["0", "129"], "between 1 and 128"),
    "logprobs": LOGPROBS,
    "top_logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "truncate_prompt_tokens": Number(["1", str(2**63 - 1)], ["0"], "Expected `int` >= 1"),
    "best_of": Number(["1"], ["0", "2"], "ask for n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ONE_OF_ALL)
def test_every_number(hostile: Hostile, endpoint: str) -> None:
    tried = 0
    for field in fields(endpoint):
        if not field.kinds & {"int", "float"}:
            continue
        row = NUMBERS[field.name]  # a KeyError here: a new field that needs its row
        if field.name == "max_tokens" and endpoint == GENERATE:
            row = UNCUT
        top = field.name.partition("[")[0]
        for text in row.good:
            response = hostile.post(endpoint, field.body(text))
            assert response.status_code == 200, f"{endpoint} {field.name} {text}: {response.text[:300]}"
        for text in [*HOSTILE, *row.bad]:
            if text in row.good:
                continue
            error = hostile.refused(endpoint, field.body(text), (field.name, top), f"{row.words}|{BEYOND}")
            assert error["message"].startswith(top) or error["message"].startswith(CONTEXT_WORDS), error
            assert len(error["message"]) < 2100
        for text in NO_NUMBERS:
            error = hostile.post(endpoint, field.body(text)).json()["error"]
            path = "logit_bias.5" if top == "logit_bias" else field.name
            assert (error["param"], error["message"]) == (path, f"{path}: JSON has no {text}")
        tried += 1
    assert tried > 15


def test_the_table_has_every_number_and_no_other() -> None:
    numbers = {f.name for endpoint in BODIES for f in fields(endpoint) if f.kinds & {"int", "float"}}
    assert numbers == set(NUMBERS)


def test_ids_that_are_names(hostile: Hostile) -> None:
    """Names in JSON objects are text. In `logit_bias` they are token ids."""
    for name, words in {
        "4096": "holds 4096",
        "-1": "holds -1",
        "x": "Expected `int`",
        "1.5": "Expected `int`",
        "": "Expected `int`",
        "NaN": "Expected `int`",
        str(2**64): "int",
        GOOGOLS: "int",
    }.items():
        for endpoint, body in BODIES.items():
            hostile.refused(endpoint, {**body, "logit_bias": {name: 1}}, "logit_bias", words)
