"""Calls of DeepSeek's versions: either is read with either template, and so are lists after a marker."""

from __future__ import annotations

import pytest

from aengine.config import CallFormatName
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import CallDelta
from aengine.text.answer.formats.table import FORMATS
from tests.text.cutting import answer, shape

FENCED = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
PLAIN = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL = ("f", '{"a": 1}')
OBJECT = '{"name": "f", "arguments": {"a": 1}}'


def parser(form: CallFormatName) -> ToolCallParser:
    return ToolCallParser(FORMATS[form], {"f": None})


@pytest.mark.parametrize("form", ["deepseek", "deepseek_v31"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{BEGIN}{FENCED}{END}", "", [CALL]),
        (f"{BEGIN}{PLAIN}{END}", "", [CALL]),
        (f"I look.\n{BEGIN}{PLAIN}{FENCED}\n{PLAIN}{END} Done.", "I look. Done.", [CALL] * 3),
        (f"{BEGIN}{PLAIN}", "", [CALL]),
        (f"{BEGIN}\n{PLAIN.replace('}<', '}}<')}\n{END}", "", [CALL]),
        (f"{BEGIN}{PLAIN.removesuffix('<｜tool▁call▁end｜>')}{END}", "", [CALL]),
        (f"{BEGIN}{PLAIN}<｜tool", "<｜tool", [CALL]),
        (f"{BEGIN}{PLAIN.replace('f<', 'h<')}{END}", f"{BEGIN}{PLAIN.replace('f<', 'h<')}{END}", []),
        (f"{BEGIN}oops{END}", f"{BEGIN}oops{END}", []),
        (f"{BEGIN}<｜tool▁call▁begin｜>{'f' * 300}", f"{BEGIN}<｜tool▁call▁begin｜>{'f' * 300}", []),
    ],
)
def test_either_version_is_read(form: CallFormatName, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert shape(answer(parser(form), text)) == ("", content, calls)
    assert shape(answer(parser(form), *text)) == ("", content, calls)


def test_arguments_are_streamed() -> None:
    reading = parser("deepseek")
    assert reading.feed(f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n") == []
    head, first = reading.feed('{"a"')
    assert isinstance(head, CallDelta)
    assert (head.name, first) == ("f", CallDelta(0, "{"))
    assert reading.feed(": 1}") == [CallDelta(0, '"a": 1}')]
    assert reading.feed("\n```<｜tool▁call▁end｜>") == []


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("phi4", f"<|tool_call|>[{OBJECT}]<|/tool_call|>"),
        ("phi4", f"<|tool_call|>{OBJECT}<|/tool_call|>"),
        ("granite", f"<|tool_call|>[{OBJECT}]"),
        ("granite", f"<|tool_call|>{OBJECT}"),
        ("olmo", "<function_calls>\nf(a=1)\n</function_calls>"),
        ("olmo", "<function_calls>f(a=1)"),
    ],
)
def test_calls_behind_a_marker(form: CallFormatName, text: str) -> None:
    assert shape(answer(parser(form), text)) == ("", "", [CALL])
    assert shape(answer(parser(form), f"Look. {text}")) == ("", "Look.", [CALL])


def test_a_call_of_kimi_has_the_id_that_the_model_wrote() -> None:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    written = (
        f'<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
        for name in ("functions.f:0", "f", "functions.f:12")
    )
    calls = answer(parser("kimi"), f"I look.{begin}{''.join(written)}{end}").calls
    assert [call.name for call in calls] == ["f"] * 3
    assert [call.id for call in calls if not call.id.startswith("call_")] == ["functions.f:0", "functions.f:12"]
