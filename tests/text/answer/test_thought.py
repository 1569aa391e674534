"""Thoughts are told from answers, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.text.answer.deltas import ContentDelta, ReasoningDelta
from aengine.text.answer.thought import ThoughtParser
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
