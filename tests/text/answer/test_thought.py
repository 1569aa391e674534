"""Thoughts are parsed, and their tokens counted, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.text.answer.deltas import ContentDelta, ReasoningDelta
from aengine.text.answer.thought import THINK, ThoughtParser, ThoughtTokenCounter, thoughts_of
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.cutting import answer, cuts, shape


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nI add.\n</think>\n\n42.", "I add.", "42."),
        ("\n <think>a</think>b", "a", "b"),
        ("<think>a\n\nb\n</think>  c\n", "a\n\nb", "  c\n"),
        ("<think>\n\n</think>\n\nb", "", "b"),
        ("a <think>b</think>", "", "a <think>b</think>"),
        ("\n\n<thinking>", "", "\n\n<thinking>"),
        ("\n\n<thin", "", "\n\n<thin"),
        ("", "", ""),
        ("<think>a\n", "a\n", ""),
        ("<think>a\n</thi", "a\n</thi", ""),
        ("<think>a</think>\n", "a", ""),
        ("<think>a<think></think>b</think>", "a<think>", "b</think>"),
    ],
)
def test_a_thought_that_the_model_opens(text: str, reasoning: str, content: str) -> None:
    assert shape(answer(ThoughtParser(), text)) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("I add.\n</think>\n\n42.", "I add.", "42."),
        ("<think>\na</think>b", "a", "b"),
        ("</think>b", "", "b"),
        ("  a", "  a", ""),
        ("\n<thi", "<thi", ""),
    ],
)
def test_a_thought_that_the_prompt_opens(text: str, reasoning: str, content: str) -> None:
    assert shape(answer(ThoughtParser(opened=True), text)) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        ("{{ '<|START_THINKING|>' + thought + '<|END_THINKING|>' }}", "<|START_THINKING|>", "<|END_THINKING|>"),
        ("{% set ends = ['<|inner_prefix|>', '<|inner_suffix|>'] %}", "<|inner_prefix|>", "<|inner_suffix|>"),
        ("{% set end = ':opensource>' %}{{ '</think' + end }}", "<think:opensource>", "</think:opensource>"),
        ("{{ '<think:opensource></think:opensource>' }}", "<think:opensource>", "</think:opensource>"),
    ],
)
def test_markers_are_found_in_the_template_or_the_vocabulary(template: str, begin: str, end: str) -> None:
    markers = thoughts_of([template], ["a", begin, end])
    assert markers == (begin, end)
    assert shape(answer(ThoughtParser(markers=markers), *f"{begin}a <b>\n{end}\n4")) == ("a <b>", "4", [])


def test_pieces_are_told_as_soon_as_they_are_sure() -> None:
    parser = ThoughtParser()
    assert parser.feed("<think>\n") == []
    assert parser.feed("I add") == [ReasoningDelta("I add")]
    assert parser.feed(".\n") == [ReasoningDelta(".")]
    assert parser.feed("So") == [ReasoningDelta("\nSo")]
    assert parser.feed("</th") == []
    assert parser.feed("ink>\n") == []
    assert not parser.over
    assert parser.feed("\n4") == [ContentDelta("4")]
    assert parser.over


PIECES = ["<think>", "</think>", "<thi", "nk>", "</", "\n", " ", "a", "é", "<"]


@given(data=st.data(), opened=st.booleans())
def test_the_cut_makes_no_difference(data: st.DataObject, opened: bool) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=14)))
    whole, cut = answer(ThoughtParser(opened), text), answer(ThoughtParser(opened), *data.draw(cuts(text)))
    assert shape(cut) == shape(whole)


@given(data=st.data(), opened=st.booleans())
def test_nothing_is_lost_but_markers_and_line_breaks(data: st.DataObject, opened: bool) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=14)))
    found = "".join(shape(answer(ThoughtParser(opened), text))[:2])
    remaining = iter(text)
    assert all(character in remaining for character in found)  # in order
    lost = sum(not character.isspace() for character in text) - sum(not character.isspace() for character in found)
    assert lost in (0, len("<think>"), len("</think>"), len("<think></think>"))


def count(pieces: list[bytes], opened: bool = False, at_once: int = 1) -> int:
    counter = ThoughtTokenCounter(pieces.__getitem__, THINK, opened)
    ids = range(len(pieces))
    for start in range(0, len(pieces), at_once):
        counter.feed(ids[start : start + at_once])
    return counter.count


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize(
    ("pieces", "opened", "expected"),
    [
        ([b"<think>", b"a", b"b", b"</think>", b"c"], False, 2),
        ([b"a", b"b", b"</think>", b"c"], True, 2),
        ([b"\n", b"<think>", b"\n", b"a", b"</think>"], False, 2),
        ([b"<think>", b"</think>", b"a"], False, 0),
        ([b"</think>", b"a"], True, 0),
        ([b"<", b"think", b">", b"a", b"</", b"think", b">\n", b"c"], False, 1),
        ([b"<think>a", b"b</think>c", b"d"], False, 2),
        ([b"<think>", b"a", b"\xf0\x9f", b"\x91\x8b"], False, 3),  # cut off
        ([b"<think>", b"</think", b"</think", b">"], False, 1),
        ([b"a", b"<think>", b"b", b"</think>"], False, 0),  # only a thought at the beginning counts
        ([b"<b>", b"<think>"], False, 0),
        ([b"", b"<think>", b"", b"a", b"</think>"], False, 2),
        ([], False, 0),
    ],
)
def test_what_counts(pieces: list[bytes], opened: bool, expected: int, at_once: int) -> None:
    assert count(pieces, opened, at_once) == expected


@given(st.lists(st.sampled_from([b"a", b"<", b"/", b"think", b">", b"</think", b"\n", b"<th"]), max_size=12))
def test_it_is_the_tokens_that_begin_before_the_end(pieces: list[bytes]) -> None:
    end = b"".join(pieces).find(b"</think>")
    starts = [sum(map(len, pieces[:place])) for place in range(len(pieces))]
    assert count(pieces, opened=True) == sum(end < 0 or start < end for start in starts)


def test_the_demo_models_markers(demo: Tokenizer) -> None:
    ids = demo.encode_now("<think>\nOne and two.\n</think>\n\nThree.")
    counter = ThoughtTokenCounter(demo.token_bytes, THINK, False)
    counter.feed(ids)
    markers = demo.answer_format.markers
    assert counter.count == ids.index(markers["</think>"]) - ids.index(markers["<think>"]) - 1
