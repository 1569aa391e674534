"""The training stream is the same for the same seed, and never shows what is held out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from bench.demo_model import arithmetic, objects, people, pools, tool_kinds, tools
from bench.demo_model.conversations import long_document, short_document
from bench.demo_model.facts import ASK, ASK_UNSEEN, Family, answer_to, sentence
from bench.demo_model.families import FAMILIES
from bench.demo_model.problems import TRAINED_PROMPTS, problems

_USER = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_EQUATION = re.compile(r"(?<!\d)(\d\d?) ([+-]) (\d\d?) =")


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return some_documents(20_000)


def some_documents(count: int) -> list[str]:
    rng = Random("documents of the tests")
    return [(long_document if i % 3 == 0 else short_document)(rng) for i in range(count)]


def test_the_same_seed_gives_the_same_documents() -> None:
    first, second = (
        [make(rng) for rng in [Random(5)] for make in (short_document, long_document) * 50] for _ in range(2)
    )
    assert first == second


@pytest.mark.slow
def test_held_out_prompts_do_not_occur_in_the_stream(documents: list[str]) -> None:
    said = {message for text in documents for message in _USER.findall(text)}
    held_out = {p.question for p in problems() if p.family not in TRAINED_PROMPTS}
    assert len(said) > 10_000
    assert not said & held_out
    plain = {line for text in documents if "<|im_start|>" not in text for line in text.splitlines()}
    starts = tuple(p.prompt for p in problems() if p.family == "arithmetic, plain completion")
    assert not [line for line in plain if line.startswith(starts)]


@pytest.mark.slow
def test_held_out_pairs_are_never_added_or_subtracted_in_the_stream(documents: list[str]) -> None:
    pairs = {(int(a), int(b)) for text in documents for a, _, b in _EQUATION.findall(text)}
    large = {(a, b) for a, b in pairs if max(a, b) > 18}  # a thought about other numbers works with 18 at most
    rng = Random(1)
    asked = [arithmetic.pair(rng, held_out=True) for _ in range(500)]
    assert len(large) > 1000
    assert not [pair for pair in large if arithmetic.is_held_out(*pair)]
    assert all(arithmetic.is_held_out(*pair) and max(pair) > 18 for pair in asked)


def test_a_tenth_of_all_pairs_is_held_out() -> None:
    pairs = [(a, b) for a in range(100) for b in range(100)]
    held_out = [pair for pair in pairs if arithmetic.is_held_out(*pair)]
    assert 0.08 < len(held_out) / len(pairs) < 0.12
    assert all(arithmetic.is_held_out(b, a) for a, b in held_out)


def _normal(question: str) -> str:
    return sentence(question).rstrip("?. ")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_unseen_forms_are_not_trained_ones(family: Family) -> None:
    for fact in family.facts:
        forms = (*family.questions, *(ask.format(thing) for ask in ASK for thing in family.things))
        trained = {_normal(form.format(*fact)) for form in forms}
        unseen = (*family.unseen, *(ask.format(thing) for ask in ASK_UNSEEN for thing in family.things))
        assert not trained & {_normal(form.format(*fact)) for form in unseen}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_question_has_one_answer(family: Family) -> None:
    answers: dict[str, str] = {}
    for fact in family.facts:
        for form in (*family.questions, *family.things):
            assert answers.setdefault(form.format(*fact), answer_to(family, fact)) == answer_to(family, fact)


@pytest.mark.slow
def test_held_out_values_are_never_copied_in_the_stream(documents: list[str]) -> None:
    kept = {value.lower() for value in (*pools.HELD_OUT.names, *pools.HELD_OUT.cities)}
    words = {word.lower() for text in documents for word in re.findall(r"\w+", text)}
    assert not words & kept
    quoted = {word.lower() for text in documents for part in re.findall(r'"([^"\n]*)"', text) for word in part.split()}
    spelled = {fact[0] for family in FAMILIES if family.name in ("spelling", "word lengths") for fact in family.facts}
    assert not quoted & set(pools.HELD_OUT.words) - spelled


def test_held_out_values_come_from_their_own_pool() -> None:
    rng = Random(2)
    for make, values in ((pools.name, "names"), (pools.city, "cities"), (pools.word, "words")):
        assert {make(rng, pools.HELD_OUT) for _ in range(2000)} == set(getattr(pools.HELD_OUT, values))


def test_held_out_objects_and_calls_are_told_apart_by_their_values() -> None:
    rng = Random(3)
    trained = {objects.request(rng, held_out=False)[1] for _ in range(3000)}
    held_out = {objects.request(rng, held_out=True)[1] for _ in range(300)}
    assert not trained & held_out
    for kind in tool_kinds.KINDS:
        tool = tools.make_tool(rng, kind)
        seen = {tools.make_call(rng, tool, pools.TRAINED, held_out=False).text for _ in range(300)}
        new = {tools.make_call(rng, tool, pools.TRAINED, held_out=True).text for _ in range(30)}
        assert not seen & new


@pytest.mark.parametrize("make", [objects.request, objects.person])
def test_requests_for_json_are_answered_by_json(make: Callable[..., tuple[str, str]]) -> None:
    rng = Random(8)
    for _ in range(500):
        _, answer = make(rng, held_out=False)
        json.loads(answer)


def test_an_object_about_a_person_has_what_was_told_in_its_order_and_case() -> None:
    rng = Random(9)
    for _ in range(500):
        question, value = people.request(rng, pools.TRAINED)
        places = [question.find(str(item)) for item in value.values()]
        assert -1 not in places, (question, value)


def test_values_come_in_many_cases() -> None:
    rng = Random(10)
    names = [pools.name(rng, pools.TRAINED) for _ in range(2000)]
    for kind in (str.islower, str.isupper, str.istitle, lambda text: not text.isascii(), lambda text: "-" in text):
        assert sum(map(kind, names)) > 20
    assert len(set(names)) > 1200


def test_unseen_cases_are_held_out_values_in_other_cases() -> None:
    usual = {*pools.HELD_OUT.names, *pools.HELD_OUT.cities, *pools.HELD_OUT.words}
    other = {*pools.HELD_OUT_CASES.names, *pools.HELD_OUT_CASES.cities, *pools.HELD_OUT_CASES.words}
    assert not usual & other
    assert {value.lower() for value in usual} == {value.lower() for value in other}


def test_calls_match_the_tools_that_are_offered() -> None:
    checked = 0
    for text in some_documents(2_000):
        if "\nTools:\n" not in text and "Tools:\n" not in text[:60]:
            continue
        specs = {
            spec["name"]: spec["parameters"]["properties"]
            for spec in map(json.loads, re.findall(r"^\{\"name\": .*\"parameters\".*\}$", text, re.MULTILINE))
        }
        for call in re.findall(r"<tool_call>\n(\{\"name\": \".*)\n</tool_call>", text):
            parsed = json.loads(call)
            assert set(parsed["arguments"]) <= set(specs[parsed["name"]])
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("operator", ["+", "-"])
def test_thoughts_are_right(operator: str) -> None:
    for a, b in ((27, 38), (12, 34), (40, 4), (52, 17), (90, 90), (7, 65), (99, 99)):
        thought = arithmetic.thought(a, b, operator)
        for left, sign, right, result in re.findall(r"(\d+) ([+-]) (\d+) = (-?\d+)", thought):
            assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        if a >= b or operator == "+":  # the last number is the tens of the result
            result = a + b if operator == "+" else a - b
            assert int(re.findall(r"\d+", thought)[-1]) == result // 10


def test_counting_goes_from_its_start_to_its_end_in_equal_steps() -> None:
    rng = Random(4)
    for _ in range(300):
        question, answer = arithmetic.counting(rng, held_out=False)
        numbers = [int(n) for n in answer.split(", ")]
        assert len({b - a for a, b in pairwise(numbers)}) == 1
        assert str(numbers[-1]) in question
