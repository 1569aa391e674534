"""Free text with calls: every call that the parser finds was allowed."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from aengine.config import CallFormatName
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.parser import AnswerParser
from aengine.text.answer.thought import ThoughtParser
from aengine.text.grammar.calls import CallGrammar
from tests.one_in import one_in
from tests.text.byte_grammars import ARGUMENTS, CITY, MARKERS, SUM, TOKENIZER, TOOLS, accepts, call, ids_of, text_of
from tests.text.cutting import read

SCHEMAS: dict[str, Any] = {
    "get_weather": CITY,
    "sum-2": SUM,
    "stop": {"type": "object", "additionalProperties": False},
}
THOUGHT = '<think>\nNo <tool_call>, {"name": no\n</think>\n\n'
THOUGHTS = ["never", "possible", pytest.param("open", marks=pytest.mark.slow)]
TEXTS = ["", "Hello", "\n\nHello", "<html> </html>", "a </thi", "a < b\n<tool", "caf\u00e9 {", " }"]
GOOD = [call("get_weather", '{"city": "Rome"}'), call("sum-2", '{"a": 7}'), call("stop", "{}")]
BAD = [call("get_weather", "{}"), call("sum-2", '{"a": "7"}'), call("other", "{}"), "<tool_call>", "<tool_call>\n{}"]
BARE_GOOD = [call("get_weather", '{"city": "Rome"}', "llama3"), call("stop", "{}", "llama3")]
BARE_BAD = [call("get_weather", "{}", "llama3"), '{"name": "stop"}', "{", "<|python_tag|>", "<|python_tag|>{}"]
special = pytest.mark.parametrize("special", [False, True])


def grammar(special: bool, form: CallFormatName = "hermes", *, thought: Any = "never", parallel: bool = True) -> str:
    return CallGrammar(TOOLS, FORMATS[form], parallel, MARKERS if special else {}).within_text(thought)


def before(thought: str) -> list[str]:
    """Return text that may come before the answer."""
    return {"never": [""], "possible": ["", THOUGHT], "open": [THOUGHT, THOUGHT.removeprefix("<think>")]}[thought]


@special
@pytest.mark.parametrize("thought", THOUGHTS)
def test_text_and_calls_in_any_order(thought: str, special: bool) -> None:
    several = grammar(special, thought=thought)
    for start in before(thought):
        for text in (*TEXTS, *GOOD, *(f"{text}{each}" for text in TEXTS for each in GOOD)):
            assert accepts(several, start + text, special), (start, text)
        assert accepts(several, f"{start}a {GOOD[1]} b{GOOD[2]}\n{GOOD[0]}\n\nc", special)
        for each in BAD:
            for text in (each, f"Hello {each}", f"{GOOD[0]}\n{each}", f"{each}{GOOD[0]}"):
                assert not accepts(several, start + text, special), (start, text)


@special
@pytest.mark.parametrize("thought", THOUGHTS)
def test_at_most_one_call(thought: str, special: bool) -> None:
    one = grammar(special, thought=thought, parallel=False)
    for start in before(thought):
        for text in ("Hello", GOOD[0], f"Hello {GOOD[1]} there"):
            assert accepts(one, start + text, special), (start, text)
        assert not accepts(one, f"{start}{GOOD[0]}\n{GOOD[1]}", special)
        assert not accepts(one, f"{start}{GOOD[0]} and {BAD[0]}", special)


@special
@pytest.mark.parametrize("thought", THOUGHTS)
def test_calls_without_a_marker(thought: str, special: bool) -> None:
    def fits(text: str, **options: Any) -> bool:
        return accepts(grammar(special, "llama3", thought=thought, **options), text, special)

    tag = "<|python_tag|>"
    for start in before(thought):
        for text in (*TEXTS, *BARE_GOOD, "; ".join(BARE_GOOD)):
            assert fits(start + text), (start, text)
        for text in BARE_BAD:
            for bad in (text, f"\n{text}", f"{tag}{text}", f"Hello {tag}{text}"):
                assert not fits(start + bad), (start, bad)
        # If the tag is text, a text before it may include it.
        assert fits(f"{start}{tag}{BARE_GOOD[0]}") == (special or start == "")
        assert fits(f"{start}Hello {tag}{BARE_GOOD[1]}") == special
        assert not fits(f"{start}{'; '.join(BARE_GOOD)}", parallel=False)


def test_an_unfinished_thought_is_no_end() -> None:
    assert not accepts(grammar(False, thought="possible"), "<think>x")
    assert not accepts(grammar(True, thought="possible"), "<think>x", special=True)
    assert accepts(grammar(False, thought="never"), "<think>x")
    assert accepts(grammar(True, thought="never"), "<think>x", special=True)


@special
@pytest.mark.parametrize("spelled", [False, True])
def test_a_marker_that_is_spelled_out_is_none_the_less_one(special: bool, spelled: bool) -> None:
    """The parser reads text, whatever its tokens are."""
    for form, bad in (("hermes", f"Hello {BAD[0]}"), ("llama3", f"Hello <|python_tag|>{BARE_BAD[0]}")):
        assert not accepts(grammar(special, form), bad, special and not spelled)  # type: ignore[arg-type]


def test_a_thought_may_name_tokens_where_its_own_markers_are_text() -> None:
    calls = {text: MARKERS[text] for text in ("<tool_call>", "</tool_call>")}
    source = CallGrammar(TOOLS, FORMATS["hermes"], tokens=calls).within_text("possible")
    ids = [*ids_of("<think>no ", False), *ids_of("<tool_call>", True), *ids_of(" here</think>Hello", False)]
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(source))
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_a_thought_whose_end_is_spelled_out_does_not_go_on() -> None:
    """The parser would have ended it there."""
    source = LLMatcher.grammar_from_lark(grammar(True, thought="possible"))
    begun, spelled = ids_of("<think>a", special=True), ids_of("</think>", special=False)
    assert LLMatcher(TOKENIZER, source).try_consume_tokens(begun + spelled) == len(begun + spelled) - 1


@special
@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("form", one_in(3, FORMATS))
@pytest.mark.parametrize("parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_whatever_is_drawn_ends_and_calls_what_may_be_called(
    form: CallFormatName, thought: str, parallel: bool, special: bool
) -> None:
    source = LLMatcher.grammar_from_lark(grammar(special, form, thought=thought, parallel=parallel))
    calls = 0
    for seed in range(8):
        if calls and seed > 1:
            break
        text = text_of(draw(LLMatcher(TOKENIZER, source), random.Random(seed), special, form))
        calls_of = ToolCallParser(FORMATS[form], ARGUMENTS, lenient=False)
        found = read(AnswerParser(ThoughtParser(thought == "open"), calls_of), text).calls
        for each in found:
            jsonschema.validate(json.loads(each.arguments), SCHEMAS[each.name])
        assert len(found) <= 1 or parallel
        calls += len(found)
    assert calls > 0


SNIPPETS = [
    *TEXTS,
    *GOOD,
    *BAD,
    *BARE_GOOD,
    *BARE_BAD,
    "<think>",
    "</think>",
    "</think>\n",
    "<|python_tag|>",
    "; ",
    "\n",
]


ENDS = [
    "</think>",
    '"}',
    "}",
    '"a": 1',
    "\n</tool_call>",
    "\n</parameter>\n",
    "</parameter>\n",
    "</arg_value>",
    "</arg_value:opensource>",
    "</tool_call:opensource>",
    "\n</tool_calls:opensource>",
    "\n</tool_calls>",
    "<|action_end|>",
    "]```",
    "</tool_call>",
    "\n</seed:tool_call>",
    "\n```",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "]<|/tool_call|>",
    "</function_calls>",
    '<|"|>',
    "}<tool_call|>",
    "a:1}<tool_call|>",
    "</function>",
    ")",
    "a=1)",
    "]",
    '"',
    "}]",
]


def draw(matcher: LLMatcher, rng: random.Random, special: bool, form: CallFormatName) -> list[int]:
    """Draw an output: as much of each snippet as is allowed, with any tokens between, up to an end."""
    right = [call("sum-2", '{"a": 7}', form), call("get_weather", '{"city": "Rome"}', form), call("stop", "{}", form)]
    output: list[int] = []
    for number in itertools.count():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.nonzero(mask)[0].tolist()
        assert allowed, text_of(output)
        assert number < 500, text_of(output)
        if allowed == [256] or (number > 30 and 256 in allowed):
            return output
        at_beginning = number == 0 or text_of(output[-8:]).endswith("</think>")
        begins = at_beginning and rng.random() < 0.5  # calls without a marker begin the answer
        snippet = rng.choice(right if begins else [*SNIPPETS, *right] if number < 30 else ENDS)
        tokens = ids_of(snippet, special)
        if (taken := matcher.try_consume_tokens(tokens)) == 0:
            tokens, taken = [rng.choice([token for token in allowed if token != 256])], 1
            matcher.consume_token(tokens[0])
        output += tokens[:taken]
    raise AssertionError
