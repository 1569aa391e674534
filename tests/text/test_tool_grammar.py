"""Grammars that force calls accept what the parser reads as a call, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cutting import answer
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from aengine.text.answer import AnswerParser
from aengine.text.reasoning import ThoughtParser
from aengine.text.tool_calls import ToolCallParser
from aengine.text.tool_grammar import tool_grammar
from aengine.text.tool_syntax import SYNTAXES, CallFormat

SPECIAL = ("<end>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "how": {"enum": ["fast", "slow"]}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
TOOLS: dict[str, dict[str, Any] | None] = {"get_weather": CITY, "sum-2": SUM, "stop": None}


class Bytes:
    """A vocabulary of all bytes and the special tokens."""

    bos_token_id = None
    eos_token_id = 256
    tokens = [bytes([value]) for value in range(256)] + [text.encode() for text in SPECIAL]
    special_token_ids = tuple(range(256, 256 + len(SPECIAL)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def ids_of(text: str, special: bool) -> list[int]:
    ids: list[int] = []
    while text:
        token = next((token for token in SPECIAL if special and text.startswith(token)), "")
        ids += [256 + SPECIAL.index(token)] if token else list(text[0].encode())
        text = text[len(token) or 1 :]
    return ids


def accepts(grammar: str, text: str, special: bool = False) -> bool:
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar), TOKENIZER) == ""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar))
    ids = ids_of(text, special)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def call(name: str, arguments: str, form: CallFormat = "hermes") -> str:
    if form == "llama3":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD = [
    ("get_weather", '{"city": "Köln \\"2\\""}'),
    ("sum-2", '{"a": 7}'),
    ("sum-2", '{"a": -7, "how": "fast"}'),
    ("stop", "{}"),
]
BAD = [
    ("get_weather", '{"city": 5}'),
    ("get_weather", "{}"),
    ("get_weather", '{"town": "Rome"}'),
    ("get_weather", '{"city":\n\n"Rome"}'),
    ("get_weather", '{\n"city": "Rome"}'),
    ("sum-2", '{"a": 7.5}'),
    ("sum-2", '{"a": 7, "how": "well"}'),
    ("stop", '{"a": 1}'),
    ("unknown", "{}"),
]


@pytest.mark.parametrize("form", list(SYNTAXES))
@pytest.mark.parametrize("special", [False, True])
def test_right_calls_pass_and_wrong_ones_do_not(form: CallFormat, special: bool) -> None:
    grammar = tool_grammar(TOOLS, SYNTAXES[form], special_tokens=SPECIAL if special else ())
    for name, arguments in GOOD:
        text = call(name, arguments, form)
        assert accepts(grammar, text, special), text
        (found,) = answer(ToolCallParser(SYNTAXES[form], frozenset(TOOLS)), text).calls
        assert (found.name, json.loads(found.arguments)) == (name, json.loads(arguments))
    for name, arguments in BAD:
        assert not accepts(grammar, call(name, arguments, form), special), (name, arguments)
    for text in ("", "Hello", call("stop", "{}", form)[:-1], f"Hello {call('stop', '{}', form)}"):
        assert not accepts(grammar, text, special), text


@pytest.mark.parametrize("form", list(SYNTAXES))
def test_several_calls_only_where_they_may_be(form: CallFormat) -> None:
    several = SYNTAXES[form].separator.join(call(*each, form) for each in GOOD)
    assert accepts(tool_grammar(TOOLS, SYNTAXES[form]), several)
    assert not accepts(tool_grammar(TOOLS, SYNTAXES[form], parallel=False), several)
    assert accepts(tool_grammar(TOOLS, SYNTAXES[form], parallel=False), call(*GOOD[0], form))
    assert len(answer(ToolCallParser(SYNTAXES[form], frozenset(TOOLS)), several).calls) == len(GOOD)


@pytest.mark.parametrize("form", list(SYNTAXES))
@pytest.mark.parametrize("special", [False, True])
def test_calls_that_need_not_be_are_right_if_they_are(form: CallFormat, special: bool) -> None:
    def grammar(**options: Any) -> str:
        named = SPECIAL if special else ()
        return tool_grammar(TOOLS, SYNTAXES[form], forced=False, special_tokens=named, **options)

    texts = ["", "Hello", 'Hello {"name": 1}\n', "a < b\n<tool"]
    calls = [call(*each, form) for each in GOOD]
    several = SYNTAXES[form].separator.join(calls)
    good = [*texts, *calls, several]
    bad = [call(*each, form) for each in BAD]
    if form == "hermes":
        good += [f"Hello {calls[0]}", f"{calls[0]}\nBye", f"a {calls[1]} b {calls[2]} c"]
        bad += [f"Hello {bad[0]}", f"{calls[0]}\n{bad[0]}", "<tool_call>", f"<tool_call>{calls[0]}"]
    else:
        bad += [f"\n{each}" for each in bad]
    if form == "llama3" and special:
        good += [f"<|python_tag|>{several}"]
        bad += [f"<|python_tag|>{bad[0]}"]
    for text in good:
        assert accepts(grammar(), text, special), text
    for text in bad:
        assert not accepts(grammar(), text, special), text
    assert accepts(grammar(parallel=False), calls[0], special)
    assert accepts(grammar(parallel=False), "Hello", special)
    thought = "<think>\nHm.\n</think>\n\n"
    assert accepts(grammar(thought="possible"), thought + calls[0], special)
    assert accepts(grammar(thought="possible"), f"{thought}Hello", special)
    assert not accepts(grammar(thought="possible"), thought + bad[0], special)


def test_a_named_tool_is_the_only_one() -> None:
    grammar = tool_grammar({"stop": None}, SYNTAXES["hermes"])
    assert accepts(grammar, call("stop", "{}"))
    assert not accepts(grammar, call(*GOOD[0]))


@pytest.mark.parametrize("special", [False, True])
def test_a_thought_may_come_first(special: bool) -> None:
    def grammar(thought: Any) -> str:
        return tool_grammar(
            TOOLS, SYNTAXES["hermes"], thought=thought, special_tokens=SPECIAL if special else (), parallel=False
        )

    stop = call("stop", "{}")
    own, opened = f"<think>\nI <b>stop</b>.\n</think>\n\n{stop}", f"I stop.\n\n</think>{stop}"
    assert accepts(grammar("possible"), own, special)
    assert accepts(grammar("possible"), stop, special)
    assert not accepts(grammar("possible"), opened, special)
    assert accepts(grammar("open"), opened, special)
    assert not accepts(grammar("open"), stop, special)
    assert not accepts(grammar("never"), own, special)
    assert not accepts(grammar("open"), f"I stop.</think> or {stop}", special)
    parser = AnswerParser(ThoughtParser(), ToolCallParser(SYNTAXES["hermes"], frozenset(TOOLS)))
    found = parser.read(own)
    assert (found.reasoning, found.content, found.calls[0].name) == ("I <b>stop</b>.", "", "stop")


def test_keywords_that_the_compiler_does_not_know_are_left_to_the_client() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}
    assert accepts(tool_grammar({"f": schema}, SYNTAXES["hermes"]), call("f", '{"a": [1, 2]}'))
