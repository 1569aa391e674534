"""Calls of GLM-4, which have no marker: what is a call, and what only looks like one."""

from __future__ import annotations

import pytest

from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import CallDelta, ContentDelta
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.parser import AnswerParser
from aengine.text.answer.thought import ThoughtParser
from aengine.text.grammar.calls import CallGrammar
from tests.text.byte_grammars import MARKERS, TOOLS, accepts
from tests.text.cutting import answer, read, shape


def parser() -> ToolCallParser:
    return ToolCallParser(FORMATS["glm4"], {"find": None, "find_all": None})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('find\n{"a": 1}', "", [("find", '{"a": 1}')]),
        ('\nfind_all\n{"a": 1}\n', "", [("find_all", '{"a": 1}')]),
        ("find\n\n{}", "", [("find", "{}")]),
        ("find\n{}<|assistant|>find_all\n{}", "", [("find", "{}"), ("find_all", "{}")]),
        ("I look.<|assistant|>find\n{}", "I look.", [("find", "{}")]),
        ("find\n{}Well.", "Well.", [("find", "{}")]),
        ('find {"a": 1}', 'find {"a": 1}', []),
        ("find\nit", "find\nit", []),
        ("find\n[]", "find\n[]", []),
        ("find\nnull\n", "find\nnull\n", []),
        ("find_\n{}", "find_\n{}", []),
        ("I look.\nfind\n{}", "I look.\nfind\n{}", []),
        ("\nHello", "\nHello", []),
        ("find", "find", []),
        ("<|assistant|>\nHello", "<|assistant|>\nHello", []),
    ],
)
def test_what_is_a_call(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert shape(answer(parser(), text)) == ("", content, calls)
    assert shape(answer(parser(), *text)) == ("", content, calls)


def test_a_call_may_follow_a_thought() -> None:
    reading = AnswerParser(ThoughtParser(), parser())
    assert shape(read(reading, '<think>\nfind\n{}\n</think>\nfind\n{"a": 1}')) == (
        "find\n{}",
        "",
        [("find", '{"a": 1}')],
    )


def test_text_waits_only_while_it_may_be_a_name() -> None:
    reading = parser()
    assert reading.feed("fin") == []
    assert reading.feed("e, ") == [ContentDelta("fin"), ContentDelta("e,")]
    reading = parser()
    assert reading.feed("find\n{") != []
    assert reading.feed('"a": "b') == [CallDelta(0, '"a": "b')]


@pytest.mark.parametrize("special", [False, True])
def test_a_grammar_of_free_text_allows_no_wrong_call(special: bool) -> None:
    grammar = CallGrammar(TOOLS, FORMATS["glm4"], tokens=MARKERS if special else {}).within_text()
    for text in ("stop", "stop it\n{}", "Hello\nstop\n{}", "stop\n{}", "stop\n{}<|assistant|>stop\n{}"):
        assert accepts(grammar, text, special), text
    for text in ('stop\n{"a": 1}', "\nstop\nit", "stop\n{} and", "stop\n{}<|assistant|>Hello"):
        assert not accepts(grammar, text, special), text
    after_thought = CallGrammar(TOOLS, FORMATS["glm4"], tokens=MARKERS if special else {}).within_text("open")
    for breaks in ("", "\n", "\n\n"):
        assert accepts(after_thought, f"a</think>{breaks}stop\n{{}}", special), breaks
        assert accepts(after_thought, f"a</think>{breaks}stop it", special), breaks
        assert not accepts(after_thought, f'a</think>{breaks}stop\n{{"a": 1}}', special), breaks
    assert accepts(grammar, "Hello<|assistant|>stop\n{}", special) == special
