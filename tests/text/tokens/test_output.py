"""Ids to shown text: detokenizing and stop strings together."""

from __future__ import annotations

from aengine.requests.sampling_params import SamplingParams
from aengine.text.tokens.output import OutputText
from aengine.text.tokens.tokenizer import Tokenizer


def shown(tokenizer: Tokenizer, text: str, params: SamplingParams) -> tuple[str, OutputText]:
    output = OutputText(tokenizer, params)
    pieces = []
    for token_id in tokenizer.encode_now(text):
        pieces.append(output.feed(token_id))
        if output.stopped:
            break
    return "".join(pieces) + output.finish(), output


def test_without_stop_strings_everything_is_shown(byte_level: Tokenizer) -> None:
    text, output = shown(byte_level, "naïve café 🎉", SamplingParams())
    assert (text, output.stopped) == ("naïve café 🎉", False)


def test_a_stop_string_ends_the_text(byte_level: Tokenizer) -> None:
    text, output = shown(byte_level, "The capital of France is Paris. The capital", SamplingParams(stop=("Paris",)))
    assert (text, output.stopped) == ("The capital of France is ", True)


def test_a_stop_string_can_be_kept(byte_level: Tokenizer) -> None:
    text, _ = shown(byte_level, "hello world", SamplingParams(stop=("lo w",), include_stop=True))
    assert text == "hello w"


def test_a_stop_string_of_several_bytes_per_character(byte_level: Tokenizer) -> None:
    text, output = shown(byte_level, "a 👋🏽 b", SamplingParams(stop=("🏽",)))
    assert (text, output.stopped) == ("a 👋", True)


def test_an_unfinished_stop_string_is_shown_at_the_end(byte_level: Tokenizer) -> None:
    assert shown(byte_level, "hello wor", SamplingParams(stop=("world",)))[0] == "hello wor"


def test_an_unfinished_character_is_shown_at_the_end_and_may_stop(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode_now("a👋")[:-1]
    output = OutputText(byte_fallback, SamplingParams(stop=("\ufffd",)))
    assert "".join(map(output.feed, ids)) == "a"
    assert output.finish() == ""
    assert output.stopped


def test_stop_strings_count_only_after_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode_now("a.b.c")
    assert len(ids) == 5
    text, _ = shown(byte_level, "a.b.c", SamplingParams(stop=(".",), min_tokens=2))
    assert text == "a.b"


def test_a_stop_string_within_the_beginning_does_not_count(byte_level: Tokenizer) -> None:
    params = SamplingParams(stop=(".",), unstopped=("<t>", "</t>"))
    assert shown(byte_level, "<t>a.b</t>c.d", params)[0] == "<t>a.b</t>c"
    assert shown(byte_level, "<t>a.b</", params)[0] == "<t>a.b</"
    assert shown(byte_level, "a.b</t>c.d", params)[0] == "a"
    assert shown(byte_level, "<", params)[0] == "<"
    params = SamplingParams(stop=(".",), unstopped=("", "</t>"), min_tokens=2)
    assert shown(byte_level, "a.b</t>c.d", params)[0] == "a.b</t>c"


def test_special_tokens_are_shown_on_request(byte_level: Tokenizer) -> None:
    assert shown(byte_level, "a<|im_end|>", SamplingParams())[0] == "a"
    assert shown(byte_level, "a<|im_end|>", SamplingParams(skip_special_tokens=False))[0] == "a<|im_end|>"
    assert shown(byte_level, "a<|im_end|>b", SamplingParams(stop=("<|im_end|>",), skip_special_tokens=False))[0] == "a"
