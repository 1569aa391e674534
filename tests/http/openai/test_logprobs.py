"""Offsets of tokens into the text of the answer."""

from __future__ import annotations

import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest

import aengine
from aengine.http.openai.logprobs import TextOffsets
from aengine.text.tokens.tokenizer import Tokenizer
from tests.http.fake_engine import FakeTokenizer

DEMO = Path(aengine.__file__).parent / "demo" / "model"
BOS, EOS, BLANK = 0, 1, 2
WAVE = "👋".encode()
PIECES = {BOS: b"<s>", EOS: b"</s>", BLANK: b" The", 3: b"a", 4: WAVE[:1], 5: WAVE[1:3], 6: WAVE[3:], 7: b"b"}


class Pieces(FakeTokenizer):
    special_ids = frozenset({BOS, EOS})

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


@pytest.mark.parametrize(
    ("ids", "hidden", "echo", "echoed", "offsets"),
    [
        ([3, 4, 5, 6, 7], {BOS, EOS}, "", 0, [0, 1, 1, 1, 2]),
        ([3, 4, 7, 4, 5, 7, 7], (), "", 0, [0, 1, 2, 3, 3, 4, 5]),  # broken characters
        ([4, 4, 5, 6, 7], (), "", 0, [0, 1, 1, 1, 2]),
        ([3, 4, EOS, 7], {EOS}, "", 0, [0, 1, 1, 2]),
        ([3, 4, 7, 3], (), "a\ufffdb", 3, [0, 1, 2, 3]),
        ([3, EOS, 7, EOS], {BOS, EOS}, "", 0, [0, 1, 1, 2]),
        ([3, EOS, 7, EOS], (), "", 0, [0, 1, 5, 6]),
        ([BOS, 3, 4, 5, 6, 7, 3], {BOS}, "a👋b", 6, [0, 0, 1, 1, 1, 2, 3]),
        ([BOS, BLANK, 3, 7], {BOS}, "Thea", 3, [0, 0, 3, 4]),  # a space that the tokenizer adds
        ([3, BOS, BLANK, 7, 3], {BOS}, "a<s>Theb", 4, [0, 1, 4, 7, 8]),  # the same after a special token
        ([BLANK, 3, 7], {BOS}, " Thea", 2, [0, 4, 5]),
        ([BOS, BOS, 3, EOS, 7], {BOS, EOS}, "<s>a", 4, [0, 3, 3, 4, 4]),  # one from the client, one from the tokenizer
        ([3, 3, 3, 7], {BOS}, "AA", 3, [0, 1, 2, 2]),  # the tokenizer changes the text: offsets never exceed it
    ],
)
def test_offsets_of_tokens(ids: list[int], hidden: set[int], echo: str, echoed: int, offsets: list[int]) -> None:
    reported = TextOffsets(Pieces(), hidden, echo, echoed)
    assert [reported.next(token_id) for token_id in ids] == offsets


def test_offsets_of_a_real_tokenizer() -> None:
    demo_tokenizer = Tokenizer.load(DEMO)
    text = "Été 👋🏽 — <|im_end|> naïve"
    ids = demo_tokenizer.encode_now(text)
    reported = TextOffsets(demo_tokenizer, (), text, len(ids))
    offsets = [reported.next(token_id) for token_id in ids]
    assert any(begin == end for begin, end in pairwise(offsets))  # a character of several tokens
    for token_id, offset in zip(ids, offsets, strict=True):
        shown = demo_tokenizer.token_text(token_id)
        assert "\ufffd" in shown or text.startswith(shown, offset)


def test_offsets_are_into_a_text_that_the_tokenizer_normalizes() -> None:
    demo_tokenizer = Tokenizer.load(DEMO)
    text = "e\u0301te\u0301 한글 👋 Cafe\u0301 z"
    text = text.replace("한글", unicodedata.normalize("NFD", "한글"))
    ids = demo_tokenizer.encode_now(text)
    reported = TextOffsets(demo_tokenizer, (), text, len(ids))
    offsets = [*(reported.next(token_id) for token_id in ids), len(text)]
    for token_id, (begin, end) in zip(ids, pairwise(offsets), strict=True):
        shown = demo_tokenizer.token_text(token_id)
        assert "\ufffd" in shown or unicodedata.normalize("NFC", text[begin:end]) == shown
