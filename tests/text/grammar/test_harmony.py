"""Grammars of answers in channels: the parser reads what they allow as what was requested."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from aengine.requests.structured import Structured
from aengine.text.answer.harmony import CONTROL, HARMONY_THOUGHT, HarmonyParser
from aengine.text.answer.parser import AnswerFormat
from aengine.text.grammar.harmony import HarmonyGrammar
from aengine.text.grammar.source import GrammarLimits, grammar_source
from tests.text.byte_grammars import ARGUMENTS, CITY, SUM, TOOLS
from tests.text.cutting import answer, shape

TOKENS = {token: 257 + index for index, token in enumerate(CONTROL)}
END = 256
SCHEMAS: dict[str, Any] = {"get_weather": CITY, "sum-2": SUM, "stop": {"type": "object", "maxProperties": 0}}
PIECE = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")
THOUGHT = "<|channel|>analysis<|message|>A <b>thought</b>\n<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
special = pytest.mark.parametrize("special", [False, True])


class Bytes:
    """A vocabulary of all bytes and the control tokens."""

    bos_token_id = None
    eos_token_id = END
    tokens = [bytes([value]) for value in range(256)] + [b"<end>"] + [token.encode() for token in CONTROL]
    special_token_ids = tuple(range(END, END + 1 + len(CONTROL)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def ids_of(text: str, special: bool) -> list[int]:
    pieces = PIECE.split(text) if special else [text]
    ids = [[TOKENS[piece]] if special and piece in TOKENS else list(piece.encode()) for piece in pieces]
    return [token for each in ids for token in each]


def accepts(source: str, text: str, special: bool) -> bool:
    if not source.startswith("{"):
        source = LLMatcher.grammar_from_lark(source)
    assert LLMatcher.validate_grammar(source, TOKENIZER) == ""
    matcher = LLMatcher(TOKENIZER, source)
    ids = ids_of(text, special)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar(special: bool, *, parallel: bool = True) -> HarmonyGrammar:
    return HarmonyGrammar(TOOLS, parallel, TOKENS if special else {})


def own(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def template(name: str, arguments: str) -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}"


@special
@pytest.mark.parametrize("write", [own, template])
def test_forced_calls(special: bool, write: Any) -> None:
    forced = grammar(special).forced()
    for name, arguments in (("get_weather", '{"city": "Köln"}'), ("sum-2", '{"a": 7}'), ("stop", "{}")):
        text = write(name, arguments)
        assert accepts(forced, text, special), text
        assert shape(answer(HarmonyParser(ARGUMENTS), text)) == ("", "", [(name, arguments)])
        several = f"{text}<|end|><|start|>assistant{text}"
        assert accepts(forced, several, special)
        assert not accepts(grammar(special, parallel=False).forced(), several, special)
        assert accepts(forced, THOUGHT.replace("<b>", "").replace("</b>", "") + text, special)
        # if markers are text, `<` is not allowed in a text
        assert accepts(forced, THOUGHT * 2 + text, special) == special
    wrong = [write("get_weather", "{}"), write("other", "{}"), write("stop", "")]
    for text in ("", "Hello", f"{FINAL}Hello", THOUGHT, *wrong):
        assert not accepts(forced, text, special), text


@special
def test_messages_and_calls_in_any_order(special: bool) -> None:
    free, one = grammar(special).free(), grammar(special, parallel=False).free()
    call, then = own("stop", "{}"), "<|end|><|start|>assistant"
    for text in (f"{FINAL}Hi", call, f"<|channel|>commentary<|message|>I look.{then}{call}", f"{FINAL}"):
        assert accepts(free, text, special), text
        assert accepts(one, text, special), text
    assert accepts(free, f"{call}{then}{call}{then}{FINAL}Hi", special)
    assert not accepts(one, f"{call}{then}{call}", special)
    for bad in (own("get_weather", "{}"), own("other", "{}"), "Hi", f"{FINAL}Hi<|end|>", f"{FINAL}a{THOUGHT}"):
        assert not accepts(free, bad, special), bad


def test_control_tokens_that_are_spelled_out_are_no_text() -> None:
    text = [*ids_of(FINAL, True), *list(b"a <|x|> b"), *list(b"<|start|>")]
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar(True).free()))
    assert matcher.try_consume_tokens(text) == len(text) - 1


@special
def test_the_form_is_the_final_messages(special: bool) -> None:
    form = AnswerFormat(harmony=True, thoughts=True, thought_markers=HARMONY_THOUGHT, markers=TOKENS if special else {})
    asked = Structured(json={"type": "object", "properties": {"a": {"type": "integer"}}}, thought="possible")
    plain = grammar_source(asked, GrammarLimits(), form)
    rules = grammar(special).rules()
    calls = grammar_source(Structured(json=asked.json, thought="possible", calls=rules), GrammarLimits(), form)
    thought = THOUGHT.replace("<b>", "").replace("</b>", "")
    for source in (plain, calls):
        for head in (FINAL, thought + FINAL, "<|channel|>final <|constrain|>json<|message|>"):
            assert accepts(source, f'{head}{{"a": 1}}', special), head
            assert not accepts(source, f'{head}{{"a": "x"}}', special)
        assert not accepts(source, '{"a": 1}', special)
        assert accepts(source, thought + own("sum-2", '{"a": 1}'), special) == (source is calls)


@special
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_whatever_is_drawn_calls_what_may_be_called(special: bool, parallel: bool, forced: bool) -> None:
    made = grammar(special, parallel=parallel)
    source = LLMatcher.grammar_from_lark(made.forced() if forced else made.free())
    called = 0
    for seed in range(12):
        text = draw(LLMatcher(TOKENIZER, source), random.Random(seed), special)
        found = answer(HarmonyParser(ARGUMENTS), text).calls
        for each in found:
            jsonschema.validate(json.loads(each.arguments), SCHEMAS[each.name])
        assert len(found) <= 1 or parallel
        assert found or not forced
        called += len(found)
    assert called > 0


SNIPPETS = [
    THOUGHT,
    FINAL,
    own("stop", "{}"),
    template("sum-2", '{"a": 7}'),
    own("get_weather", '{"city": "Rome"}'),
    own("other", "{}"),
    "<|end|><|start|>assistant",
    "Hi",
    " to=functions.stop",
]
ENDS = ['"}', "}", '"a": 1', "<|end|>", "<|message|>", "<|start|>assistant", own("stop", "{}")]


def draw(matcher: LLMatcher, rng: random.Random, special: bool) -> str:
    """Draw an output: as much of each snippet as is allowed, with any tokens between, up to an end."""
    output: list[int] = []
    for number in range(600):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.nonzero(mask)[0].tolist()
        if allowed == [END] or (number > 12 and END in allowed):
            break
        tokens = ids_of(rng.choice(SNIPPETS if number < 12 else ENDS), special)
        if (taken := matcher.try_consume_tokens(tokens)) == 0:
            tokens, taken = [rng.choice([token for token in allowed if token != END])], 1
            matcher.consume_token(tokens[0])
        output += tokens[:taken]
    else:
        raise AssertionError(output)
    return b"".join(Bytes.tokens[token] for token in output).decode(errors="replace")
