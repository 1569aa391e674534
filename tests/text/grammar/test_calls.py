"""Grammars that force calls accept what the parser reads as a call, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from aengine.config import CallFormatName
from aengine.errors import InvalidRequestError
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.parser import AnswerParser, answer_format_of
from aengine.text.answer.thought import GEMMA_THINK, ThoughtParser
from aengine.text.grammar.calls import CallGrammar
from tests.text.byte_grammars import ARGUMENTS, MARKERS, TOKENIZER, TOOLS, accepts, call, calls
from tests.text.cutting import answer, read

GOOD = [
    ("get_weather", '{"city": "Köln \\"2\\""}'),
    ("sum-2", '{"a": 7}'),
    ("sum-2", '{"a": -7, "how": "fast"}'),
    ("stop", "{}"),
]
BAD = [
    ("get_weather", "{}"),
    ("get_weather", '{"town": "Rome"}'),
    ("sum-2", '{"a": 7.5}'),
    ("sum-2", '{"a": 7, "how": "well"}'),
    ("stop", '{"a": 1}'),
    ("unknown", "{}"),
]


@pytest.mark.parametrize("form", list(FORMATS))
@pytest.mark.parametrize("special", [False, True])
def test_right_calls_pass_and_wrong_ones_do_not(form: CallFormatName, special: bool) -> None:
    grammar = CallGrammar(TOOLS, FORMATS[form], tokens=MARKERS if special else {}).forced()
    for name, arguments in GOOD:
        text = call(name, arguments, form)
        assert accepts(grammar, text, special), text
        (found,) = answer(ToolCallParser(FORMATS[form], ARGUMENTS), text).calls
        assert (found.name, json.loads(found.arguments)) == (name, json.loads(arguments))
    for name, arguments in BAD:
        assert not accepts(grammar, call(name, arguments, form), special), (name, arguments)
    for text in ("", "Hello", call("stop", "{}", form)[:-1], f"Hello {call('stop', '{}', form)}"):
        assert not accepts(grammar, text, special), text


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "mistral_list"])
def test_json_is_written_in_one_way(form: CallFormatName) -> None:
    for arguments in ('{"city": 5}', '{"city":\n\n"Rome"}', '{\n"city": "Rome"}', '{"city":"Rome"}'):
        assert not accepts(CallGrammar(TOOLS, FORMATS[form]).forced(), call("get_weather", arguments, form))


@pytest.mark.parametrize("form", list(FORMATS))
def test_several_calls_only_where_they_may_be(form: CallFormatName) -> None:
    several = calls(GOOD, form)
    assert accepts(CallGrammar(TOOLS, FORMATS[form]).forced(), several)
    assert not accepts(CallGrammar(TOOLS, FORMATS[form], parallel=False).forced(), several)
    assert accepts(CallGrammar(TOOLS, FORMATS[form], parallel=False).forced(), call(*GOOD[0], form))
    assert len(answer(ToolCallParser(FORMATS[form], ARGUMENTS), several).calls) == len(GOOD)


def test_a_named_tool_is_the_only_one() -> None:
    grammar = CallGrammar(TOOLS[2:], FORMATS["hermes"]).forced()
    assert accepts(grammar, call("stop", "{}"))
    assert not accepts(grammar, call(*GOOD[0]))


@pytest.mark.parametrize("special", [False, True])
def test_a_thought_may_come_first(special: bool) -> None:
    def grammar(thought: Any) -> str:
        tokens = MARKERS if special else {}
        return CallGrammar(TOOLS, FORMATS["hermes"], parallel=False, tokens=tokens).forced(thought)

    stop = call("stop", "{}")
    own, opened = f"<think>\nI <b>stop</b>.\n</think>\n\n{stop}", f"I stop.\n\n</think>{stop}"
    assert accepts(grammar("possible"), own, special)
    assert accepts(grammar("possible"), stop, special)
    assert not accepts(grammar("possible"), opened, special)
    assert accepts(grammar("open"), opened, special)
    assert not accepts(grammar("open"), stop, special)
    assert not accepts(grammar("never"), own, special)
    assert not accepts(grammar("open"), f"I stop.</think> or {stop}", special)
    parser = AnswerParser(ThoughtParser(), ToolCallParser(FORMATS["hermes"], ARGUMENTS))
    found = read(parser, own)
    assert (found.reasoning, found.content, found.calls[0].name) == ("I <b>stop</b>.", "", "stop")


def test_keywords_that_the_compiler_does_not_know_are_left_to_the_client_unless_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}
    assert accepts(CallGrammar([CallableTool("f", schema)], FORMATS["hermes"]).forced(), call("f", '{"a": [1, 2]}'))
    with pytest.raises(InvalidRequestError, match="unique items"):
        CallGrammar([CallableTool("f", schema, strict=True)], FORMATS["hermes"]).forced()
    schema = {"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}}
    strict = CallGrammar([CallableTool("f", schema, strict=True)], FORMATS["hermes"]).forced()
    assert "contains" in LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(strict), TOKENIZER)


@pytest.mark.parametrize("form", list(FORMATS))
def test_numbers_of_arguments_have_an_end(form: CallFormatName) -> None:
    properties = {"i": {"type": "integer"}, "f": {"type": "number"}}
    tool = CallableTool("f", {"type": "object", "properties": properties, "required": ["i", "f"]})
    grammar = CallGrammar([tool], FORMATS[form]).forced()
    assert accepts(grammar, call("f", '{"i": -123456789, "f": 1.5}', form))
    for many in ("1" * 20, "-" + "1" * 20):
        assert not accepts(grammar, call("f", f'{{"i": {many}, "f": 1}}', form)), many
    assert not accepts(grammar, call("f", '{"i": 1, "f": 0.000}', form).replace("0.0", "0.3333333333"))


def test_a_thought_whose_marker_has_a_word_behind_it() -> None:
    """Gemma 4 writes it: the marker is a token, the word is text."""
    stop = call("stop", "{}", "gemma4")
    tokens = {"<|channel>": MARKERS["<|channel>"], "<channel|>": MARKERS["<channel|>"]}
    grammar = CallGrammar(TOOLS, FORMATS["gemma4"], tokens=MARKERS | tokens, thoughts=GEMMA_THINK)
    thought = "<|channel>thought\nI stop.\n<channel|>"
    for source in (grammar.forced("possible"), grammar.within_text("possible")):
        assert accepts(source, thought + stop, special=True)
        assert accepts(source, stop, special=True)
        assert not accepts(source, f"<|channel>other\n<channel|>{stop}", special=True)
    parser = AnswerParser(ThoughtParser(markers=GEMMA_THINK), ToolCallParser(FORMATS["gemma4"], ARGUMENTS))
    found = read(parser, thought + stop)
    assert (found.reasoning, found.content, found.calls[0].name) == ("I stop.", "", "stop")
    form = answer_format_of(["<|channel>thought <channel|>"], (tokens | {"x": 1}).get, frozenset(tokens.values()))
    assert form.thought_markers == GEMMA_THINK
    assert form.shown_special_ids(thoughts=True, calls=None) == tuple(sorted(tokens.values()))
