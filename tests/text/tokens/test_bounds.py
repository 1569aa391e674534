"""The bounds on a tokenizer's work, when it runs on the event loop, and the fewest tokens of a text."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from aengine.errors import CheckpointError, InvalidRequestError
from aengine.model.loading.hub import DEMO
from aengine.text.tokens import tokenizer as module
from aengine.text.tokens.backend import decoder_of
from aengine.text.tokens.bad_words import banned_sequences
from aengine.text.tokens.bounds import (
    MAX_OUTPUT,
    is_quick,
    largest_growth,
    longest_token_bytes,
    minimum_tokens,
    refuse_growth,
)
from aengine.text.tokens.pieces import PieceTable, rules_of
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import BACKENDS, byte_fallback_backend, byte_level_backend, write_tokenizer

pytestmark = pytest.mark.anyio

CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + b"trie" + b"ab\0" + b"x" * 600 + b"\0").decode()


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def template(*pieces: tuple[str, str], ids: int = 1) -> dict[str, Any]:
    form = [{kind: {"id": name, "type_id": 0}} for kind, name in pieces]
    special = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}}
    return {"type": "TemplateProcessing", "single": form, "pair": form, "special_tokens": special}


SPECIAL, TEXT = ("SpecialToken", "x"), ("Sequence", "A")


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"normalizer": replace("a", "b" * 513)}, "normalizer"),
        ({"normalizer": replace("", "b" * 600)}, "normalizer"),
        ({"normalizer": replace("a?", "b" * 600, "Regex")}, "normalizer"),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 600}}, "normalizer"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 3}}, "normalizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "normalizer"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 4}}, "pre_tokenizer"),
        ({"decoder": {"type": "Sequence", "decoders": [replace("a", "b" * 5)] * 2}}, "decoder"),
        ({"post_processor": template(SPECIAL, TEXT, ids=65)}, "post_processor"),
        ({"post_processor": template(*[SPECIAL] * 65, TEXT)}, "post_processor"),
        ({"post_processor": template(TEXT, TEXT)}, "post_processor"),
        ({"post_processor": {"type": "Sequence", "processors": [template(SPECIAL, TEXT)] * 65}}, "post_processor"),
    ],
)
def test_what_could_grow_without_a_bound_is_refused(part: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"here: its {'.*' if named == 'pre_tokenizer' else ''}{named}"):
        refuse_growth(Path("here"), json.dumps(part).encode())


@pytest.mark.parametrize(
    "form",
    [
        {"special_tokens": {"x": 1}},
        {"special_tokens": {"x": {"ids": 1}}},
        {"single": None},
        {"single": [1]},
        {"single": [{"Sequence": {}}]},
        {"single": [{"Sequence": {"id": []}}]},
    ],
)
def test_a_post_processor_without_a_known_form_is_refused_by_the_files_name(form: dict[str, Any]) -> None:
    text = json.dumps({"post_processor": {"type": "TemplateProcessing", **form}})
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json is not a tokenizer: its post_processor"):
        refuse_growth(Path("tokenizer.json"), text.encode())


def test_what_published_tokenizers_do_is_taken() -> None:
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]},
        "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(SPECIAL, TEXT, SPECIAL)]},
        "decoder": {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]},
    }
    refuse_growth(Path("here"), json.dumps(parts).encode())
    refuse_growth(Path("here"), b"no JSON")


def test_the_bounds_hold_for_what_the_library_makes() -> None:
    """Each step alone, with the characters that it lengthens most."""
    text = "ﷺΐÅa <é"
    for step in (
        normalizers.NFKC(),
        normalizers.NFKD(),
        normalizers.NFC(),
        normalizers.NFD(),
        normalizers.Lowercase(),
        normalizers.ByteLevel(),
        normalizers.BertNormalizer(strip_accents=False),
        normalizers.Replace("a", "bcd"),
        normalizers.Replace(Regex(""), "xy"),
        normalizers.Prepend("xyz"),
    ):
        backend = byte_level_backend()
        backend.normalizer, backend.pre_tokenizer = step, None  # type: ignore[assignment]
        for character in text:
            assert len(step.normalize_str(character)) <= largest_growth(backend), (step, character)


def family(normalizer: Any = None, pattern: str = "", pre_tokenizer: Any = None) -> Backend:
    backend = byte_level_backend()
    if normalizer is not None:
        backend.normalizer = normalizer
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    return backend


@pytest.mark.parametrize(
    ("backend", "quick"),
    [
        (byte_level_backend, True),
        (lambda: Backend.from_file(str(DEMO / "tokenizer.json")), True),
        (lambda: family(pattern=r"\p{N}{1,3}| ?\p{L}+|\s+"), True),
        (lambda: family(pattern=r"(a+)+$"), False),
        (lambda: family(pattern=r"\s+|(?:a|\s+|b)*c"), False),
        (lambda: family(pattern=r"[|]|\s+"), False),
        (lambda: family(normalizers.NFKC()), False),
        (lambda: family(normalizers.Replace(Regex("x*y"), "")), False),
        (lambda: family(normalizers.Replace(Regex(" {2,}"), " ")), True),
    ],
)
def test_which_tokenizers_are_quick(backend: Callable[[], Backend], quick: bool) -> None:
    assert is_quick(backend()) == quick


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tokenizer, list[bool]]:
    """Return a tokenizer with an unknown pattern, and a list that records for each text whether this thread tokenized
    it.
    """
    config = {"chat_template": "{{ messages[0].content }}"}
    write_tokenizer(tmp_path, family(pattern="(a|b)+c|."), config)
    tokenizer = Tokenizer.load(tmp_path)
    encode, here = Tokenizer._encode, threading.get_ident()
    on_loop: list[bool] = []

    def watched(*arguments: Any) -> list[int]:
        on_loop.append(threading.get_ident() == here)
        return encode(*arguments)

    monkeypatch.setattr(Tokenizer, "_encode", watched)
    return tokenizer, on_loop


async def test_a_tokenizer_with_patterns_of_its_own_never_runs_on_the_loop(slow: tuple[Tokenizer, list[bool]]) -> None:
    tokenizer, on_loop = slow
    await tokenizer.encode("ab")
    await tokenizer.encode_literal("ab", 100)
    await tokenizer.encode_pair("a", "b", 100)
    await tokenizer.encode_chat([{"role": "user", "content": "ab"}])
    await banned_sequences(["ab"], tokenizer, 1000)
    assert on_loop == [False] * 6


async def test_a_text_that_takes_too_long_is_refused(
    slow: tuple[Tokenizer, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(Tokenizer, "_encode", lambda *_: time.sleep(0.2))
    with pytest.raises(InvalidRequestError, match="the tokenizer takes longer than"):
        await slow[0].encode("ab")


async def test_the_length_of_a_text_is_bounded_by_what_it_may_become(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, family(normalizers.Replace("a", "b" * 100)))
    most = MAX_OUTPUT // 500
    with pytest.raises(InvalidRequestError, match=f"the text has {most + 1} characters; the limit is {most}"):
        await Tokenizer.load(tmp_path).encode("x" * (most + 1))


def test_a_post_processor_of_the_library_is_measured_alike() -> None:
    added = processors.TemplateProcessing(single="[a] $A" + " [a]" * 64, special_tokens=[("[a]", 1)])
    text = json.dumps({"post_processor": json.loads(added.__getstate__())})
    with pytest.raises(CheckpointError, match="adds 65 ids"):
        refuse_growth(Path("here"), text.encode())


KNOWN = {"byte level", "byte fallback", "gemma", "two blanks"}

# The texts that normalization shortens most: letters with marks, Korean in its parts, compatibility signs.
COMPOSED = [*"ǖṩᾂ한각ệΐ", *(chr(code) for code in range(0x1F00, 0x2000))]
SHRINKING = ["".join(unicodedata.normalize("NFD", one) for one in COMPOSED), "\u212a\u1fef\u2126", "e\u0301"]


def longest_of(backend: Backend) -> int | None:
    rules = rules_of(decoder_of(backend))
    tokens = {token_id: token for token, token_id in backend.get_vocab().items()}
    return longest_token_bytes(backend, None if rules is None else PieceTable(rules, tokens, frozenset()))


def texts(backend: Backend) -> list[str]:
    """Texts of the vocabulary's own tokens, of characters that shrink, of anything."""
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
    """Each character of Unicode is decomposed and composed again."""
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


def test_ids_whose_text_the_library_cannot_make_have_a_replacement_character(tmp_path: Path) -> None:
    """A decoder that strips more than there is panics in Rust. That is no `Exception`, and would end a connection."""
    folder = write_tokenizer(tmp_path, byte_level_backend(), {})
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    strip = {"type": "Strip", "content": "a", "start": 9, "stop": 9}
    described["decoder"] = {"type": "Sequence", "decoders": [described["decoder"], strip]}
    path.write_text(json.dumps(described))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.pieces is None
    assert tokenizer.decode(tokenizer.encode_now("a b c")) == " b c"
    assert tokenizer.decode(tokenizer.encode_now("aaaa")) == "\ufffd"
