"""Messages in channels: thoughts, content and calls, with any mistakes of a model, however the text is cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.text.answer.deltas import CallDelta, ContentDelta, ReasoningDelta
from aengine.text.answer.formats.base import Tools
from aengine.text.answer.harmony import CONTROL, HARMONY_THOUGHT, HarmonyParser, uses_harmony
from aengine.text.answer.parser import AnswerParser, answer_format_of
from tests.one_in import one_in
from tests.text.cutting import answer, cuts, read, shape

TOOLS: Tools = {"f": None, "get_weather": None, "patch": {"type": "object", "properties": {"diff": {}}}}
THOUGHT = "<|channel|>analysis<|message|>Think.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
CALLED = [("f", '{"a": 1}')]


def parser(**options: bool) -> HarmonyParser:
    return HarmonyParser(TOOLS, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}Hello.<|return|>", ("Think.", "Hello.", [])),
        (f"{FINAL}Hello.", ("", "Hello.", [])),
        (f"{THOUGHT}{NEXT}{CALL}<|call|>", ("Think.", "", CALLED)),
        (CALL, ("", "", CALLED)),
        # As chat templates write it, and with mistakes of models.
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "", CALLED)),
        (f'{THOUGHT}{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', ("Think.", "", CALLED)),
        ('<|channel|>commentary to=functions.f json<|message|>{"a": 1}', ("", "", CALLED)),
        ('<|channel|>analysis to=functions.f<|message|>{"a": 1}', ("", "", CALLED)),
        ('<|channel|>commentary to=f<|message|>\n{"a": 1}', ("", "", CALLED)),
        ("<|channel|>commentary to=functions.f<|constrain|>json<|message|><|call|>", ("", "", [("f", "{}")])),
        ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>", ("", "", [("f", "{}")])),
        (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", ("", "I look.", CALLED)),
        (f"<|channel|>commentary<|message|>So.<|end|>{NEXT}{FINAL}Hi.", ("", "So.\nHi.", [])),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}Hi.", ("Think.\nThink.", "Hi.", [])),
        (f"{CALL}<|end|>{NEXT}{CALL}<|call|>", ("", "", CALLED * 2)),
        (f"{THOUGHT}{FINAL}Hi.", ("Think.", "Hi.", [])),
        ("<|channel|>analysis<|message|>Think.<|channel|>final<|message|>Hi.", ("Think.", "Hi.", [])),
        ("<|channel|>other<|message|>Hi.", ("", "Hi.", [])),
        ("<|message|>Hi.", ("", "Hi.", [])),
        # Without a header.
        ("Hello <|world|>.", ("", "Hello <|world|>.", [])),
        ("to be", ("", "to be", [])),
        (" to", ("", " to", [])),
        (f"Hello<|end|>{NEXT}{FINAL}Hi.", ("", "Hello\nHi.", [])),
        ("<|channel|>" + "x" * 300, ("", "x" * 300, [])),
        ("<|channel|>fin", ("", "", [])),
        ("", ("", "", [])),
        ("<|chan", ("", "<|chan", [])),
        # To an unknown recipient.
        (
            "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}",
            ("", "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}", []),
        ),
        # A string of arguments may hold anything.
        (CALL[:-3] + ' "<|end|>\\"<|call|>"}<|call|>', ("", "", [("f", '{"a": "<|end|>\\"<|call|>"}')])),
        (f'{CALL}"<|end|>{NEXT}{FINAL}Hi', ("", "Hi", CALLED)),
        # Arguments that are not an object.
        (CALL[:-8] + "null<|call|>", ("", "", [("f", "{}")])),
        (CALL[:-8] + '"{\\"a\\": 1}"', ("", "", CALLED)),
        (CALL[:-1], ("", "", CALLED)),
        ("<|channel|>commentary to=patch<|message|>+ a\n<|call|>", ("", "", [("patch", '{"diff": "+ a\\n"}')])),
        (CALL[:-8] + "ls -l", ("", "", [("f", '{"input": "ls -l"}')])),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    ],
)
def test_messages(text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert shape(answer(parser(), text)) == expected
    assert shape(answer(parser(), *text)) == expected


def test_pieces_are_told_as_they_come() -> None:
    reading = parser()
    assert reading.feed("<|channel|>analysis<|message|>I ") == [ReasoningDelta("I ")]
    assert reading.feed("think <") == [ReasoningDelta("think ")]
    assert reading.feed("b> <|en") == [ReasoningDelta("<b> ")]
    assert reading.feed(f"d|>{NEXT}<|channel|>commentary to=functions.f ") == []
    assert reading.feed("<|constrain|>json") == []
    (head,) = reading.feed("<|message|>")
    assert isinstance(head, CallDelta)
    assert (head.index, head.name, head.arguments) == (0, "f", "")
    assert head.id is not None
    assert head.id.startswith("call_")
    assert reading.feed('{"a"') == [CallDelta(0, "{")]
    assert reading.feed(": 1}<|call|>") == [CallDelta(0, '"a": 1}')]
    assert reading.calls == 1
    assert reading.finish() == []


def test_one_call_where_no_more_may_be() -> None:
    several = f"{CALL}<|end|>{NEXT}{CALL}<|end|>{NEXT}{FINAL}Hi."
    assert shape(answer(parser(parallel=False), several)) == ("", "Hi.", CALLED)


def test_thoughts_are_content_where_they_are_not_told() -> None:
    assert shape(answer(parser(thoughts=False), f"{THOUGHT}{NEXT}{FINAL}Hi.")) == ("", "Think.\nHi.", [])


WORDS = [
    *CONTROL,
    *CONTROL,
    "analysis",
    "final",
    "commentary",
    "assistant",
    " to=functions.f",
    " to=functions.g",
    "to=",
    " ",
    "\n",
    "json",
    "{",
    '"',
    '{"',
    '{"a": 1}',
    "<",
    "<|",
    "|>",
    "<|en",
    "user",
    "x" * 250,
    CALL,
    THOUGHT,
    FINAL,
    NEXT,
]
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=16).map("".join)


@settings(max_examples=4 * settings.default.max_examples)
@given(data=st.data(), text=texts, parallel=st.booleans(), thoughts=st.booleans())
def test_whatever_is_written_is_an_answer(data: st.DataObject, text: str, parallel: bool, thoughts: bool) -> None:
    def made() -> AnswerParser:
        return AnswerParser(harmony=parser(parallel=parallel, thoughts=thoughts))

    whole = read(made(), text)
    assert shape(answer(made(), *text)) == shape(whole)
    assert shape(answer(made(), *data.draw(cuts(text)))) == shape(whole)
    assert all(call.name in TOOLS and isinstance(json.loads(call.arguments), dict) for call in whole.calls)
    assert len(whole.calls) <= 1 or parallel
    assert not whole.reasoning or thoughts
    if not any(token in text for token in CONTROL):
        assert (whole.content, whole.reasoning) == (text, "")


@given(said=st.text(), thought=st.text(), arguments=st.dictionaries(st.text(), st.text() | st.integers()))
def test_texts_pass_unchanged(said: str, thought: str, arguments: dict[str, object]) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    if any(token in f"{said}{thought}{written}" for token in CONTROL):
        return
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    text = (
        f"<|channel|>analysis<|message|>{thought}<|end|>{NEXT}<|channel|>commentary<|message|>{said}<|end|>"
        f"{NEXT}{head}{written}<|call|>"
    )
    assert shape(answer(parser(), text)) == (thought, said, [("get_weather", written)])


@pytest.mark.parametrize(
    "text",
    one_in(
        3,
        [
            FINAL + "x" * 40_000,
            "<|start|>" * 6_000,
            "<|channel|>" * 6_000,
            "<" * 40_000,
            " to=" * 10_000,
            CALL * 800,
        ],
    ),
)
def test_time_is_linear(text: str) -> None:
    begin = time.process_time()
    answer(parser(), *text)
    read(AnswerParser(harmony=parser()), text * 3)
    assert time.process_time() - begin < 2


def test_the_format_is_found_in_the_template() -> None:
    template = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    ids = {token: 100 + index for index, token in enumerate(CONTROL)}
    form = answer_format_of([template], (ids | {"<think>": 1, "</think>": 2}).get, frozenset({100, 101}))
    assert (form.harmony, form.calls, form.thoughts, form.thought_markers) == (True, None, True, HARMONY_THOUGHT)
    assert form.markers == ids
    assert form.shown_special_ids(thoughts=False, calls=None) == (100, 101)
    assert not uses_harmony("<|user|>{{ message }}<|end|>")
    assert not answer_format_of(["<|user|>{{ message }}<|end|>"], ids.get, frozenset(ids.values())).markers


def test_an_answer_that_is_cut_short_has_no_half_call_as_text() -> None:
    for end in range(len("<|channel|>"), len(CALL)):
        reading = parser()
        deltas = reading.feed(CALL[:end]) + reading.finish(cut=True)
        assert all(isinstance(delta, CallDelta) for delta in deltas)
        assert reading.cut == bool(deltas)


def test_content_is_content_from_its_first_character() -> None:
    assert parser().feed("Hel") == [ContentDelta("Hel")]
