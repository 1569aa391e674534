"""Fragments of text hold whole characters, and join to the text of all ids decoded at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from aengine.text.tokens.detokenizer import Detokenizer
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import SPECIAL, unusual_backend, write_tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "👋🏽 waves, 👩‍👩‍👧 hugs, 🇫🇷 flag, 🎉🎉",
    "你好，世界。こんにちは、안녕하세요",
    "e\u0301 a\u0308 o\u0302\u0323 \u0915\u094d\u0937 ก็",  # combining marks
    "a\r\n\tb   c\u00a0d\u2028e\x00f",
    "",
]


def fragments(tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, prompt or [])
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Ids of the vocabulary, and a few beyond it."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=max_size)


@given(data=st.data(), skip=st.booleans())
def test_fragments_join_to_the_full_decode(any_tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(ids_of(any_tokenizer))
    assert "".join(fragments(any_tokenizer, ids, skip)) == any_tokenizer.decode(ids, skip)


@given(data=st.data(), skip=st.booleans())
def test_after_a_prompt_the_fragments_are_what_the_prompt_does_not_say(
    any_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt, ids = data.draw(ids_of(any_tokenizer, 6)), data.draw(ids_of(any_tokenizer, 12))
    before, both = any_tokenizer.decode(prompt, skip), any_tokenizer.decode(prompt + ids, skip)
    if "\ufffd" in before:  # the prompt ends within a character
        return
    assert before + "".join(fragments(any_tokenizer, ids, skip, prompt)) == both


@given(data=st.data())
def test_some_special_tokens_may_be_shown(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(any_tokenizer))
    shown = sorted(any_tokenizer.special_ids)[: data.draw(st.integers(0, 2))]
    detokenizer = Detokenizer(any_tokenizer, True, shown_special_ids=shown)
    visible = [token_id for token_id in ids if token_id in shown or token_id not in any_tokenizer.special_ids]
    text = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
    assert text == any_tokenizer.decode(visible, skip_special_tokens=False)


@given(data=st.data())
def test_no_fragment_is_broken_unless_the_text_is(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(any_tokenizer))
    if "\ufffd" not in any_tokenizer.decode(ids):
        assert "\ufffd" not in "".join(fragments(any_tokenizer, ids))


@given(data=st.data(), skip=st.booleans())
def test_the_text_is_the_librarys(
    any_tokenizer: Tokenizer, any_oracle: Backend, data: st.DataObject, skip: bool
) -> None:
    """Byte for byte, with one exception: for byte tokens that are not UTF-8, the library returns only U+FFFD."""
    ids = data.draw(ids_of(any_tokenizer))
    expected = any_oracle.decode(ids, skip_special_tokens=skip)
    joined = "".join(fragments(any_tokenizer, ids, skip))
    if "\ufffd" in expected and "ByteFallback" in str(any_oracle.decoder):
        assert "\ufffd" in joined
    else:
        assert joined == expected


@given(data=st.data(), skip=st.booleans())
def test_the_demo_models_text_is_the_librarys(
    demo: Tokenizer, demo_oracle: Backend, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(ids_of(demo, 60))
    assert "".join(fragments(demo, ids, skip)) == demo_oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_through_ids(byte_level: Tokenizer, byte_level_oracle: Backend, text: str) -> None:
    ids = byte_level.encode_now(text)
    assert "".join(fragments(byte_level, ids)) == byte_level_oracle.decode(ids)


@given(data=st.binary(max_size=40))
def test_any_bytes_read_as_a_utf8_decoder_reads_them(byte_level: Tokenizer, data: bytes) -> None:
    by_byte = {byte_level.token_bytes(token_id): token_id for token_id in range(byte_level.vocab_size)}
    ids = [by_byte[bytes([byte])] for byte in data]
    assert "".join(fragments(byte_level, ids)) == data.decode("utf-8", "replace")


def test_a_character_comes_with_its_last_byte(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode_now("👋")[1:]
    assert fragments(byte_fallback, ids, prompt=byte_fallback.encode_now("a")) == ["", "", "", "👋", ""]


def test_a_character_that_never_ends_is_shown_at_the_end(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode_now("a👋")[:-1]
    assert "".join(fragments(byte_fallback, ids)) == "a\ufffd"
    assert fragments(byte_fallback, ids)[-1] == "\ufffd"


def test_special_tokens_are_hidden_or_written_out(byte_level: Tokenizer) -> None:
    ids = byte_level.encode_now(f"<think>a{SPECIAL[2]}b")
    assert "".join(fragments(byte_level, ids, skip=True)) == "<think>ab"
    assert "".join(fragments(byte_level, ids, skip=False)) == "<think>a<|im_end|>b"


def test_a_hidden_token_does_not_cut_a_character(byte_fallback: Tokenizer) -> None:
    start, *wave = byte_fallback.encode_now("👋")
    ids = [start, *wave[:2], 1, *wave[2:]]  # <s> among the bytes
    assert "".join(fragments(byte_fallback, ids)) == "👋"


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_ids_outside_the_vocabulary_add_nothing(any_tokenizer: Tokenizer, token_id: int) -> None:
    assert fragments(any_tokenizer, [token_id, token_id]) == ["", "", ""]
    assert any_tokenizer.decode([token_id]) == ""
    assert any_tokenizer.token_text(token_id) == ""


def test_the_space_at_the_start_belongs_to_a_text_not_to_its_continuation(byte_fallback: Tokenizer) -> None:
    the = byte_fallback.encode_now("the")
    assert "".join(fragments(byte_fallback, the)) == "the"
    assert "".join(fragments(byte_fallback, the, prompt=[1])) == "the"  # a prompt of <s> alone changes nothing
    assert "".join(fragments(byte_fallback, the, prompt=byte_fallback.encode_now("a"))) == " the"


def test_a_character_of_the_prompt_is_not_completed_by_the_output(byte_fallback: Tokenizer) -> None:
    start, *wave = byte_fallback.encode_now("👋")
    assert "".join(fragments(byte_fallback, wave[2:], prompt=[start, *wave[:2]])) == "\ufffd\ufffd"
    assert "".join(fragments(byte_fallback, [3 + ord("a")], prompt=wave[:2])) == "a"


def test_characters_come_whole_from_an_unknown_decoder_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, unusual_backend()))
    assert tokenizer.pieces is None
    ids = tokenizer.encode_now("a 👋🏽 é")
    pieces = fragments(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == " a 👋🏽 é"
    assert [piece for piece in pieces if piece] == [" a", " ", "👋", "🏽", " ", "é"]


def test_a_model_that_only_writes_junk_is_not_held_back(byte_level: Tokenizer) -> None:
    (lone,) = [token_id for token_id in range(byte_level.vocab_size) if byte_level.token_bytes(token_id) == b"\x80"]
    assert fragments(byte_level, [lone] * 5) == ["\ufffd"] * 5 + [""]


def test_an_unknown_decoder_holds_back_a_bounded_number_of_tokens(no_decoder: Tokenizer) -> None:
    """Its text always ends with U+FFFD, so waiting for the rest of a character would never end."""
    replacement = no_decoder.encode_now("\ufffd") * 100
    pieces = fragments(no_decoder, replacement)
    assert "".join(pieces) == no_decoder.decode(replacement)
    assert max(len(piece) for piece in pieces) < 40


def test_detokenizers_share_one_table(byte_level: Tokenizer) -> None:
    first, second = Detokenizer(byte_level), Detokenizer(byte_level)
    assert first._texts is second._texts
