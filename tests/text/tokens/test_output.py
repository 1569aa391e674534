"""The text of an output: stop strings end it wherever its fragments are cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.requests.sampling_params import SamplingParams
from aengine.text.tokens.output import OutputText, StopMatcher, UnstoppedBeginning
from aengine.text.tokens.tokenizer import Tokenizer


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops, include)
    return [*map(matcher.feed, pieces), matcher.flush()], matcher


def naive(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Search the whole text: the first end of any stop string, and the longest one that ends there."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Stop strings, and fragments of their beginnings, so that nearly everything nearly matches."""
    stops = draw(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
    beginnings = [stop[:size] for stop in stops for size in range(1, len(stop) + 1)]
    pieces = draw(st.lists(st.sampled_from(beginnings), max_size=8))
    if draw(st.booleans()):
        pieces = list("".join(pieces))
    return stops, pieces


@given(case=cases(), include=st.booleans())
def test_the_text_is_that_of_a_naive_search(case: tuple[list[str], list[str]], include: bool) -> None:
    stops, pieces = case
    shown, matcher = run(stops, pieces, include)
    assert ("".join(shown), matcher.matched) == naive(stops, "".join(pieces), include)


@given(case=cases())
def test_only_the_beginning_of_a_stop_string_is_held_back(case: tuple[list[str], list[str]]) -> None:
    stops, pieces = case
    text = "".join(pieces)
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.feed, text))
    if matcher.matched is None:
        held = text[len(shown) :]
        beginnings = [
            text[-size:] for size in range(1, len(text) + 1) if any(s.startswith(text[-size:]) for s in stops)
        ]
        assert held == max(beginnings, key=len, default="")


def test_a_stop_string_across_fragments() -> None:
    shown, matcher = run(["</answer>"], ["42</", "ans", "wer", "> more"])
    assert shown == ["42", "", "", "", ""]
    assert matcher.matched == "</answer>"


def test_a_stop_string_inside_one_fragment() -> None:
    assert run(["STOP"], ["before STOP after", "more"])[0] == ["before ", "", ""]


def test_include_stop_keeps_it_and_nothing_after() -> None:
    assert run(["STOP"], ["before ST", "OP after"], include=True)[0] == ["before ", "STOP", ""]


def test_what_did_not_become_a_stop_string_is_shown() -> None:
    assert run(["abc"], ["ab", "d"])[0] == ["", "abd", ""]
    assert run(["abc"], ["xab"])[0] == ["x", "ab"]


def test_the_stop_string_completed_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"])[1].matched == "bc"


def test_of_those_completed_together_the_longest_wins() -> None:
    shown, matcher = run(["c", "abc"], ["xabc"])
    assert matcher.matched == "abc"
    assert "".join(shown) == "x"


def test_nothing_follows_a_stop_string() -> None:
    matcher = StopMatcher(["."])
    matcher.feed("one.")
    assert (matcher.feed("two"), matcher.flush()) == ("", "")


@pytest.mark.parametrize("stop", ["a" * 1024, "a" * 1023 + "b", "ab" * 512])
def test_long_stop_strings_take_linear_time(stop: str) -> None:
    """One character at a time, against a stop string that the text almost completes again and again."""

    def seconds(characters: int) -> float:
        matcher = StopMatcher([stop])
        text = (stop[:-1] + "x") * (characters // len(stop) + 1)
        start = time.thread_time()
        for character in text[:characters]:
            matcher.feed(character)
        return time.thread_time() - start

    assert min(seconds(40_000) for _ in range(3)) < 1  # rescanning the text held back takes 40,000 x 1,024 steps


def test_blanks_before_the_beginning_take_linear_time() -> None:
    reading = UnstoppedBeginning("<t>", "</t>")
    start = time.thread_time()
    for _ in range(300_000):
        assert reading.feed("\n") == ("", "")
    assert reading.flush() == ("", "\n" * 300_000)
    assert time.thread_time() - start < 2  # copying the text so far takes tens of seconds


PARTS = st.lists(st.sampled_from(["<t>", "</t>", "<", "</", "t>", " ", "\n", "a", "stop"]), max_size=8).map("".join)


@given(text=PARTS, begin=st.sampled_from(["", "<t>"]), at=st.lists(st.integers(0, 40), max_size=6).map(sorted))
def test_the_beginning_in_which_no_stop_string_counts(text: str, begin: str, at: list[int]) -> None:
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    reading = UnstoppedBeginning(begin, "</t>")
    found = [*map(reading.feed, pieces), reading.flush()]
    unstopped, rest = ("".join(part) for part in zip(*found, strict=True))
    assert unstopped + rest == text
    if not text.lstrip().startswith(begin):
        assert unstopped == ""
    else:
        before, end, behind = text.partition("</t>")
        assert (unstopped, rest) == (before + end, behind)


@given(at=st.lists(st.integers(0, 40), max_size=6).map(sorted), again=st.booleans())
def test_several_beginnings_in_which_no_stop_string_counts(at: list[int], again: bool) -> None:
    text, rest = " <t>a</t>+<t>b</t>", "+<u>c<t>d</t>"
    pieces = [(text + rest)[i:j] for i, j in zip([0, *at], [*at, 40], strict=True)]
    reading = UnstoppedBeginning("<t>", "</t>", *(["+<t>"] if again else []))
    found = [*map(reading.feed, pieces), reading.flush()]
    assert tuple(map("".join, zip(*found, strict=True))) == (
        (text, rest) if again else (" <t>a</t>", "+<t>b</t>" + rest)
    )


def shown(tokenizer: Tokenizer, text: str, params: SamplingParams) -> tuple[str, OutputText]:
    output = OutputText(tokenizer, params)
    pieces = []
    for token_id in tokenizer.encode_now(text):
        pieces.append(output.feed(token_id))
        if output.stop_string is not None:
            break
    return "".join(pieces) + output.finish(), output


def test_without_stop_strings_everything_is_shown(byte_level: Tokenizer) -> None:
    text, output = shown(byte_level, "naïve café 🎉", SamplingParams())
    assert (text, output.stop_string) == ("naïve café 🎉", None)


def test_a_stop_string_ends_the_text(byte_level: Tokenizer) -> None:
    text, output = shown(byte_level, "The capital of France is Paris. The capital", SamplingParams(stop=("Paris",)))
    assert (text, output.stop_string) == ("The capital of France is ", "Paris")


def test_a_stop_string_can_be_kept(byte_level: Tokenizer) -> None:
    text, _ = shown(byte_level, "hello world", SamplingParams(stop=("lo w",), include_stop=True))
    assert text == "hello w"


def test_a_stop_string_of_several_bytes_per_character(byte_level: Tokenizer) -> None:
    text, output = shown(byte_level, "a 👋🏽 b", SamplingParams(stop=("🏽",)))
    assert (text, output.stop_string) == ("a 👋", "🏽")


def test_an_unfinished_stop_string_is_shown_at_the_end(byte_level: Tokenizer) -> None:
    assert shown(byte_level, "hello wor", SamplingParams(stop=("world",)))[0] == "hello wor"


def test_an_unfinished_character_is_shown_at_the_end_and_may_stop(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode_now("a👋")[:-1]
    output = OutputText(byte_fallback, SamplingParams(stop=("\ufffd",)))
    assert "".join(map(output.feed, ids)) == "a"
    assert output.finish() == ""
    assert output.stop_string == "\ufffd"


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
