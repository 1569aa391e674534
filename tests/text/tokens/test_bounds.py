"""What a tokenizer may make of a text, and when it runs on the event loop."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from aengine.errors import CheckpointError, InvalidRequestError
from aengine.model.loading.hub import DEMO
from aengine.text.tokens import tokenizer as module
from aengine.text.tokens.bad_words import banned_sequences
from aengine.text.tokens.bounds import MAX_OUTPUT, is_quick, largest_growth, refuse_growth
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import byte_level_backend, write_tokenizer

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
        refuse_growth(Path("here"), json.dumps(part))


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
        refuse_growth(Path("tokenizer.json"), text)


def test_what_published_tokenizers_do_is_taken() -> None:
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]},
        "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(SPECIAL, TEXT, SPECIAL)]},
        "decoder": {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]},
    }
    refuse_growth(Path("here"), json.dumps(parts))
    refuse_growth(Path("here"), "no JSON")


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
    """A tokenizer with a pattern of its own, and whether each text was tokenized in the test's own thread."""
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
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(Tokenizer, "_encode", lambda *_: time.sleep(0.2))
    with pytest.raises(InvalidRequestError, match="the tokenizer takes longer than"):
        await slow[0].encode("ab")


async def test_the_length_of_a_text_is_bounded_by_what_it_may_become(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, family(normalizers.Replace("a", "b" * 100)))
    most = MAX_OUTPUT // 500
    with pytest.raises(InvalidRequestError, match=f"the text has {most + 1} characters, at most {most} are tokenized"):
        await Tokenizer.load(tmp_path).encode("x" * (most + 1))


def test_a_post_processor_of_the_library_is_measured_alike() -> None:
    added = processors.TemplateProcessing(single="[a] $A" + " [a]" * 64, special_tokens=[("[a]", 1)])
    text = json.dumps({"post_processor": json.loads(added.__getstate__())})
    with pytest.raises(CheckpointError, match="adds 65 ids"):
        refuse_growth(Path("here"), text)
