"""The fewest tokens a text can have: never more than it has, or what fits would be refused."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from aengine.text.tokens.backend import decoder_of
from aengine.text.tokens.minimum_tokens import longest_token_bytes, minimum_tokens
from aengine.text.tokens.pieces import PieceTable, rules_of
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import BACKENDS, byte_fallback_backend, byte_level_backend

KNOWN = {"byte level", "byte fallback", "gemma", "two blanks"}

# What normalization makes shortest: letters with marks, Korean in its parts, signs that stand for others.
COMPOSED = [*"ǖṩᾂ한각ệΐ", *(chr(code) for code in range(0x1F00, 0x2000))]
SHRINKING = ["".join(unicodedata.normalize("NFD", one) for one in COMPOSED), "\u212a\u1fef\u2126", "e\u0301"]


def longest_of(backend: Backend) -> int | None:
    rules = rules_of(decoder_of(backend))
    tokens = {token_id: token for token, token_id in backend.get_vocab().items()}
    return longest_token_bytes(backend, None if rules is None else PieceTable(rules, tokens, frozenset()))


def texts(backend: Backend) -> list[str]:
    """Of the vocabulary's own tokens, of what shrinks, of anything."""
    rng = random.Random(0)
    tokens = [token.replace("Ġ", " ").replace("▁", " ") for token in backend.get_vocab()]
    tokens.sort(key=len)
    mixed = ["".join(rng.choices([*tokens, *SHRINKING, "<|im_end|>", " ", "👋🏽"], k=50)) for _ in range(50)]
    return ["", "a", *(token * 20 for token in tokens[-40:]), *(one * 20 for one in SHRINKING), *mixed]


@pytest.mark.parametrize("family", sorted(KNOWN))
def test_never_more_than_there_are(family: str) -> None:
    backend = BACKENDS[family]()
    longest = longest_of(backend)
    assert longest is not None
    for text in texts(backend):
        assert minimum_tokens(text, longest) <= len(backend.encode(text, add_special_tokens=False).ids), text


@pytest.mark.parametrize("form", [normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD()])
def test_nor_under_another_normalization(form: normalizers.Normalizer) -> None:
    backend = byte_level_backend()
    backend.normalizer = form
    longest = longest_of(backend)
    assert longest is not None
    for text in texts(backend):
        assert minimum_tokens(text, longest) <= len(backend.encode(text).ids), text


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_no_composition_makes_less_than_a_byte_of_two_characters(form: str) -> None:
    """Each character of Unicode taken apart and put together again."""
    for code in [*range(0xD800), *range(0xE000, 0x110000)]:
        whole = chr(code)
        if unicodedata.is_normalized("NFD", whole) and unicodedata.is_normalized(form, whole):  # type: ignore[arg-type]
            continue
        apart = unicodedata.normalize("NFD", whole)
        for text in {whole, apart}:
            assert text.isascii() or 2 * len(unicodedata.normalize(form, text).encode()) >= len(text)  # type: ignore[arg-type]


def test_texts_of_the_longest_token_have_just_so_many(byte_level: Tokenizer) -> None:
    text, longest = "<|endoftext|>" * 100, len("<|endoftext|>")
    assert minimum_tokens(text, longest) == len(byte_level.encode_now(text)) == 100
    assert minimum_tokens(text + "a", longest) == 101


@pytest.mark.parametrize("family", sorted(set(BACKENDS) - KNOWN))
def test_families_whose_texts_lose_something_have_no_bound(family: str) -> None:
    assert longest_of(BACKENDS[family]()) is None


def swallowing(backend: Backend) -> None:
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])


def collapsing(backend: Backend) -> None:
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")


def stripping(backend: Backend) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def dropping(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior="removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )


@pytest.mark.parametrize("change", [swallowing, collapsing, stripping, dropping])
def test_nor_has_one_that_leaves_blanks_out(change: Callable[[Backend], None]) -> None:
    backend = byte_level_backend()
    change(backend)
    assert longest_of(backend) is None


def test_nor_has_one_that_lacks_a_byte() -> None:
    backend = byte_fallback_backend()
    fused = models.BPE({**backend.get_vocab(), "x" * 100: 1000}, [], fuse_unk=True, unk_token="<unk>")
    backend.model = fused
    assert longest_of(backend) is None
