"""The examination asks the same for the same seed, and grades strictly."""

from __future__ import annotations

import pytest

from bench.demo_model.evaluate import grade, report
from bench.demo_model.problems import TARGETS, Problem, problems


def _problem(rule: str, expected: str) -> Problem:
    return Problem("a family", "prompt", "question", expected, rule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "expected", "right", "wrong"),
    [
        ("exact", "Paris.", ["Paris."], ["Paris", " Paris.", "Paris. It is"]),
        ("starts", " 42", [" 42", " 42.", " 42\n"], [" 421", "42", " 4"]),
        (
            "json",
            '{"a": 1, "b": [2]}',
            ['{"b": [2], "a": 1}', '{"a":1,"b":[2]}'],
            ['{"a": true, "b": [2]}', '{"a": 1', ""],
        ),
        (
            "call",
            '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
            ['<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>'],
            [
                'Sure. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
                '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
            ],
        ),
    ],
)
def test_grading(rule: str, expected: str, right: list[str], wrong: list[str]) -> None:
    problem = _problem(rule, expected)
    assert all(problem.is_right(text) for text in right)
    assert not any(problem.is_right(text) for text in wrong)


@pytest.mark.slow
def test_the_examination_is_the_same_each_time_and_covers_every_target() -> None:
    some = problems(share=0.1)
    assert some == problems(share=0.1)
    assert some != problems(seed=1, share=0.1)
    assert set(TARGETS) <= {p.family for p in some}
    assert len(some) < len(problems()) / 4


@pytest.mark.slow
def test_the_expected_answers_are_graded_as_right() -> None:
    assert all(p.is_right(p.expected) for p in problems())


def test_the_report_names_what_missed_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [p for p in problems(share=0.1) if p.family in ("arithmetic", "greetings")]
    assert report(asked, [p.expected for p in asked])
    assert not report(asked, ["?" if p.family == "arithmetic" else p.expected for p in asked], mistakes=1)
    lines = capsys.readouterr().out.splitlines()
    assert any("arithmetic" in line and "MISSED" in line for line in lines)
    assert grade(asked, [p.expected for p in asked])["greetings"] == (55, 55)
