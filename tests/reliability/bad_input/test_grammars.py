"""Regexes and schemas made to blow up: an answer in time, and a server that others do not notice it by."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from aengine.requests.structured import Structured
from tests.reliability.bad_input.fields import BODIES
from tests.reliability.bad_input.hostile import Hostile, hostile_demo
from tests.reliability.bad_input.meanwhile import Meanwhile
from tests.text.grammar.test_bounds import BOMBS

SECONDS = 1.0  # that a grammar may take; five as it is shipped
CHAT = "/v1/chat/completions"
GENERATE = "/generate"


@pytest.fixture(scope="module")
def compiling() -> Iterator[Hostile]:
    with hostile_demo(grammar_seconds=SECONDS) as hostile:
        yield hostile
        hostile.settled()


def asked(bomb: Structured) -> dict[str, dict[str, Any]]:
    """The fields that can hold the grammar, by their names in errors."""
    if isinstance(bomb.json, Mapping):
        function = {"name": "f", "parameters": {**bomb.json, "type": "object"}}
        forced = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        told: dict[str, Any] = {"type": "json_schema", "json_schema": {"schema": bomb.json}}
        return {
            "response_format": {"response_format": told},
            "structured_outputs.json": {"structured_outputs": {"json": bomb.json}},
            "guided_json": {"guided_json": bomb.json},
            "tools": forced,
        }
    value = bomb.regex or bomb.grammar
    return {
        f"structured_outputs.{bomb.kind}": {"structured_outputs": {bomb.kind: value}},
        f"guided_{bomb.kind}": {f"guided_{bomb.kind}": value},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_every_field(compiling: Hostile, name: str) -> None:
    """A grammar is accepted if it is harmless, refused by field name, or refused with 503 while others compile."""
    for param, fields in asked(BOMBS[name]).items():
        with Meanwhile(compiling) as meanwhile:
            began = time.monotonic()
            response = compiling.post(CHAT, {**BODIES[CHAT], **fields, "max_tokens": 4})
            took = time.monotonic() - began
        case = f"{param}: {response.status_code} after {took:.1f} s: {response.text[:300]}"
        assert took < SECONDS + 15, case
        assert meanwhile.worst < 5, f"{meanwhile.worst:.1f} s for /health; {case}"
        assert response.status_code in (200, 400, 503), case
        if response.status_code == 400:
            error = response.json()["error"]
            # Tools are shown to the model, so that a long schema may be too long a prompt first.
            wheres = ("tools", "tools[0].function.parameters") if param == "tools" else (param,)
            assert error["param"] in (("messages",) if error["code"] == "context_length_exceeded" else wheres), case
            begins = "This model's maximum context" if error["param"] == "messages" else f"{error['param']}: "
            assert error["message"].startswith(begins), case
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "queue_full", case


def test_what_takes_too_long_is_given_up() -> None:
    """With less time than the bomb takes: its answer comes when the time is over, not when the compiler is done."""
    bomb = asked(BOMBS["a chain of objects"])["guided_json"]
    with hostile_demo(grammar_seconds=0.02) as hurried:
        body = {**BODIES[GENERATE], **bomb}
        hurried.refused(GENERATE, body, "guided_json", r"compiling it takes longer than 0\.02 seconds")
        hurried.settled()


# Regexes that blow up backtracking matchers. Here an automaton reads them, and they force endless text.
REDOS = [r"(a+)+$", r"(a|a)*b", r"(a|aa)+c", r"(.*a){25}", r"^(([a-z])+.)+[A-Z]([a-z])+$", r"(x+x+)+y", r"((a*)*)*b"]


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", BODIES)
def test_regexes_that_blow_up_elsewhere(compiling: Hostile, endpoint: str) -> None:
    for regex in REDOS:
        body = {**BODIES[endpoint], "guided_regex": regex, "max_tokens": 32, "temperature": 0}
        with Meanwhile(compiling) as meanwhile:
            began = time.monotonic()
            assert compiling.post(endpoint, body).status_code in (200, 400)
        assert time.monotonic() - began < SECONDS + 15
        assert meanwhile.worst < 5


@pytest.mark.slow
def test_a_crowd_of_bombs_leaves_room_for_prompts(compiling: Hostile) -> None:
    body = {**BODIES[GENERATE], "guided_grammar": BOMBS["rules that double"].grammar}
    with Meanwhile(compiling, GENERATE, body, clients=12) as meanwhile:
        for _ in range(5):
            plain = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0, "stream": False}
            assert compiling.post(GENERATE, plain).json()["text"] == " Paris."
    assert meanwhile.worst < 5
    assert set(meanwhile.statuses) <= {200, 400, 503}
