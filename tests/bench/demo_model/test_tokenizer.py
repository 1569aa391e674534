"""The tokenizer reads and writes any text, digit by digit, with ChatML's tokens as Qwen has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from bench.demo_model.chat_format import IMAGE_TOKEN
from bench.demo_model.evaluate import MODEL
from bench.demo_model.pools import HELD_OUT
from bench.demo_model.tokenizer import SPECIAL, TAGS, VOCAB_SIZE, Ids, save_tokenizer, train_tokenizer

TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))


DOCUMENTS = 8_000


@pytest.fixture(scope="module")
def new() -> Tokenizer:
    return train_tokenizer(seed=1, documents=DOCUMENTS)


@given(st.text())
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == TOKENIZER.normalizer.normalize_str(text)


@pytest.mark.parametrize(
    "text",
    [
        "Grüße",
        "こんにちは世界",
        "👨‍👩‍👧 and 🇫🇷",
        "नमस्ते",
        "a\u0301 becomes á",
        "\x00\x7f\t\r\n  \u2028",
        "<think>x</think>",
    ],
)
def test_texts_of_many_scripts_survive(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids) == TOKENIZER.normalizer.normalize_str(text)


def test_every_byte_that_utf_8_has_is_a_token() -> None:
    """The image token has the id of a byte that UTF-8 lacks."""
    single = [token for token in TOKENIZER.get_vocab() if len(token) == 1]
    assert set(pre_tokenizers.ByteLevel.alphabet()) - set(single) == {"\u00c0"}
    assert len(single) == 255


def test_digits_stand_alone() -> None:
    assert TOKENIZER.encode("12 + 345").tokens == ["1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    assert not [t for t in TOKENIZER.get_vocab() if len(t) > 1 and any(c in "0123456789" for c in t)]


def test_chat_tokens_are_special_and_tags_are_text() -> None:
    added = {token.content: token.special for token in TOKENIZER.get_added_tokens_decoder().values()}
    assert added == {**dict.fromkeys((*SPECIAL, IMAGE_TOKEN), True), **dict.fromkeys(TAGS, False)}
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    ids = TOKENIZER.encode("<|im_start|>user\n<tool_call>").ids
    assert TOKENIZER.decode(ids) == "user\n<tool_call>"


def test_common_words_are_single_tokens() -> None:
    assert TOKENIZER.encode("The capital of France is Paris.").tokens == [
        "The",
        "Ġcapital",
        "Ġof",
        "ĠFrance",
        "Ġis",
        "ĠParis",
        ".",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("word", [*HELD_OUT.names, *HELD_OUT.cities, *HELD_OUT.words, "Anna", "anna", "Müller"])
def test_a_word_has_the_same_pieces_in_a_sentence_and_in_quotes(new: Tokenizer, word: str) -> None:
    bare = new.encode(word).tokens
    after_space = new.encode(f" {word}").tokens
    assert after_space in ([f"Ġ{bare[0]}"], ["Ġ", *bare])
    assert new.encode(f'"{word}"').tokens == ['"', *bare, '"']


@pytest.mark.slow
def test_training_it_again_gives_the_same_tokenizer(new: Tokenizer, tmp_path: Path) -> None:
    first, second = new, train_tokenizer(seed=1, documents=DOCUMENTS)
    assert first.to_str() == second.to_str()
    assert len([token for token in first.get_vocab() if len(token) == 1]) == 256
    save_tokenizer(first, tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == first.to_str()
    assert Ids.of(first).turn_end == first.token_to_id("<|im_end|>")


def test_too_small_a_corpus_is_refused() -> None:
    with pytest.raises(RuntimeError, match="too small"):
        train_tokenizer(documents=50)
