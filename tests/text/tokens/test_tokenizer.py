"""Reads a checkpoint's tokenizer, and turns prompts into ids without holding the event loop."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from aengine.errors import CheckpointError, ContextLengthError, InvalidRequestError
from aengine.text.tokens.tokenizer import INLINE_CHARACTERS, Tokenizer
from tests.text.text_families import SPECIAL, byte_fallback_backend, byte_level_backend, write_tokenizer

pytestmark = pytest.mark.anyio

TEXTS = ["hello world", " leading", "", "a<|im_end|>b<think>c", "你好 👋🏽 é", "x" * 300, "\n\n \t"]


def saved(folder: Path) -> dict[str, Any]:
    """Return a tokenizer.json as data, to be damaged."""
    write_tokenizer(folder, byte_level_backend())
    data: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return data


# ---- loading ----------------------------------------------------------------------------------------------


def test_nothing_but_tokenizer_json_is_needed(byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_id is None
    assert byte_level.special_ids == {byte_level.encode_now(text)[0] for text in SPECIAL}
    assert max(map(max, map(byte_level.encode_now, TEXTS[3:]))) < byte_level.vocab_size


@pytest.mark.parametrize("value", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False, "special": True}])
def test_eos_as_text_or_object(tmp_path: Path, value: object) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_backend(), {"eos_token": value}))
    assert tokenizer.eos_token_id == tokenizer.encode_now("<|im_end|>")[0]


def test_a_named_token_becomes_special(tmp_path: Path) -> None:
    backend = byte_level_backend()
    config = {"eos_token": "<think>", "additional_special_tokens": ["</think>"], "pad_token": "not in the vocabulary"}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, config))
    assert tokenizer.decode(tokenizer.encode_now("a<think>b</think><tool_call>")) == "ab<tool_call>"
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_special_tokens_map_of_older_checkpoints(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), {})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert Tokenizer.load(tmp_path).eos_token_id is not None


def test_flags_in_tokenizer_config_win(tmp_path: Path) -> None:
    backend = byte_level_backend()
    think = backend.token_to_id("<think>")
    entry = {"content": "<think>", "special": True, "normalized": False}
    # the id is not the next one: it belongs to another vocabulary
    elsewhere = {"content": "<|im_end|>x", "special": True}
    config = {"added_tokens_decoder": {str(think): entry, "99999": elsewhere}}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, config))
    assert think in tokenizer.special_ids
    assert tokenizer.vocab_size == backend.get_vocab_size()


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": False, "add_eos_token": False}, {"add_bos_token": True}], ids=str
)
@pytest.mark.parametrize("bos", ["<s>", None])
def test_raw_prompts_give_transformers_ids(tmp_path: Path, flags: dict[str, object], bos: str | None) -> None:
    config = {"bos_token": bos, "eos_token": "</s>", **flags}
    backend = byte_fallback_backend()
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 1)])
    folder = write_tokenizer(tmp_path, backend, config)
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in [*TEXTS, "a</s><s>b"]:
        assert ours.encode_now(text) == theirs(text).input_ids


def test_bos_and_eos_that_only_the_config_asks_for(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_fallback_backend(), config))
    plain = byte_fallback_backend().encode("the end").ids
    assert tokenizer.encode_now("the end") == [1, *plain, 2]


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_backend()
    expected = [backend.encode(text).ids for text in TEXTS]
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend))
    assert list(map(tokenizer.encode_now, TEXTS)) == expected


def test_pieces_of_text_for_logprobs(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert byte_level.token_text(byte_level.encode_now("<|im_end|>")[0]) == "<|im_end|>"
    (lone,) = [i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == b"\xf0"]
    assert byte_level.token_text(lone) == "\ufffd"
    assert byte_fallback.token_text(byte_fallback.encode_now("the")[0]) == " the"


@pytest.mark.parametrize("bytes_", [b"", b"{", b"null", b"[]", b'"text"', b"{}", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_not_what_it_should_be(tmp_path: Path, name: str, bytes_: bytes) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), {})
    (tmp_path / name).write_bytes(bytes_)
    if (name, bytes_) == ("tokenizer_config.json", b"{}"):
        Tokenizer.load(tmp_path)
        return
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    text = json.dumps(saved(tmp_path))
    for share in (0.1, 0.5, 0.99):
        (tmp_path / "tokenizer.json").write_text(text[: int(len(text) * share)])
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "there is none, and no other kind is supported; put a tokenizer.json there"),
        ({"tekken.json": "{}"}, r"there is tekken\.json \(Mistral's tekken\); put"),
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": null}}'}, "is supported; put"),
        ({"tokenizer_config.json": '{"auto_map": ["AutoTokenizer"]}'}, "is supported; put"),
        (
            {
                "tiktoken.model": "IQ== 0",
                "tokenizer_config.json": json.dumps(
                    {
                        "tokenizer_class": "TikTokenTokenizer",
                        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
                    }
                ),
            },
            r"there is tiktoken\.model .*code in the repository \(tokenization_kimi\.TikTokenTokenizer, which "
            r"`trust_remote_code` would run elsewhere\), and such code is never run here; put a tokenizer\.json there",
        ),
    ],
)
def test_other_forms_of_a_tokenizer_are_refused_by_name(files: dict[str, str], why: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=why):
        Tokenizer.load(tmp_path)


WRONG_CONFIGS: list[dict[str, object]] = [
    {"eos_token": 7},
    {"eos_token": ""},
    {"eos_token": {"text": "x"}},
    {"add_bos_token": "yes"},
    {"added_tokens_decoder": [1]},
    {"added_tokens_decoder": {"x": {"content": "y"}}},
    {"added_tokens_decoder": {"-1": {"content": "y"}}},
    {"added_tokens_decoder": {"1": "y"}},
    {"added_tokens_decoder": {"1": {"content": "y", "special": "yes"}}},
    {"additional_special_tokens": "x"},
    {"additional_special_tokens": [None]},
    {"chat_template": 7},
    {"chat_template": [{"name": "default"}]},
    {"chat_template": ["x"]},
    {"a\x1b[2J_token": {"content": ""}},
]


@pytest.mark.parametrize("config", WRONG_CONFIGS, ids=str)
def test_wrong_types_in_tokenizer_config(tmp_path: Path, config: dict[str, object]) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json") as error:
        Tokenizer.load(tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", None),
        ("model", {"type": "BPE", "vocab": [], "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
        ("model", {"type": "BPE", "vocab": {}, "merges": []}),
        ("model", {"type": "Unheard"}),
        ("decoder", {"type": "Unheard"}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        ("added_tokens", [{"id": 1}]),
        ("added_tokens", 7),
    ],
    ids=str,
)
def test_wrong_values_in_tokenizer_json(tmp_path: Path, key: str, value: object) -> None:
    data = saved(tmp_path)
    data[key] = value
    if key == "model":
        data["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_ids_that_no_vocabulary_reaches(tmp_path: Path) -> None:
    data = saved(tmp_path)
    data["model"]["vocab"]["far"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has token ids up to 2147483648"):
        Tokenizer.load(tmp_path)


def test_tokens_beyond_the_models_vocabulary_are_read_and_never_looked_for(tmp_path: Path) -> None:
    template = "{{ tools }}<tool_call>{{ messages }}"
    write_tokenizer(tmp_path, byte_level_backend(), {"chat_template": template})
    whole = Tokenizer.load(tmp_path)
    call = whole.answer_format.markers["<tool_call>"]
    some = Tokenizer.load(tmp_path, vocab_size=call)
    assert some.encode_now("a<tool_call>") == whole.encode_now("a<tool_call>")
    assert "<tool_call>" not in some.answer_format.markers


# ---- encoding ---------------------------------------------------------------------------------------------


async def test_long_and_short_prompts_are_read_alike(byte_level: Tokenizer) -> None:
    for text in [*TEXTS, "The capital of France. " * 1000, "a<|im_end|>" * INLINE_CHARACTERS]:
        assert await byte_level.encode(text) == byte_level.encode_now(text)


async def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    for text in ("ab\ud800", "a" * INLINE_CHARACTERS + "\udfff"):
        with pytest.raises(InvalidRequestError, match=f"surrogate at character {len(text) - 1}"):
            await byte_level.encode(text)


async def test_text_that_the_tokenizer_has_no_token_for(tmp_path: Path) -> None:
    backend = byte_fallback_backend()
    backend.add_tokens([AddedToken("x")])
    data = json.loads(backend.to_str())
    data["model"] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}
    data["added_tokens"] = []
    data["normalizer"], data["pre_tokenizer"] = None, {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(InvalidRequestError, match="cannot read this text"):
        await tokenizer.encode("a b c")


MEGABYTE = 2**20


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris. " * (MEGABYTE // 32),
        pytest.param(
            "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=MEGABYTE)), marks=pytest.mark.slow
        ),
        pytest.param("a" * MEGABYTE, marks=pytest.mark.slow),
        pytest.param(" " * MEGABYTE, marks=pytest.mark.slow),
        pytest.param("你好世界" * (MEGABYTE // 12), marks=pytest.mark.slow),
    ],
    ids=["prose", "one word", "one letter", "blanks", "ideographs"],
)
async def test_a_megabyte_does_not_hold_the_loop(demo: Tokenizer, text: str) -> None:
    """Neither our own work nor the library holds the interpreter."""
    held: list[float] = []  # the longest times that the loop worked or stood still
    while len(held) < 5 and min(held, default=1.0) >= 1.0:  # the machine may be busy
        encoding = asyncio.ensure_future(demo.encode(text))
        gaps, work = [], []
        began = wall = time.perf_counter()
        cpu = time.thread_time()
        while not encoding.done():
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - wall)
            work.append(time.thread_time() - cpu)
            wall, cpu = wall + gaps[-1], cpu + work[-1]
        assert await encoding
        held.append(max(max(work) / 0.05, max(gaps) / max(0.05, (wall - began) / 2)))
    assert min(held) < 1.0


async def test_giving_up_on_a_long_prompt_takes_no_time(demo: Tokenizer) -> None:
    text = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=MEGABYTE // 4))
    start = time.perf_counter()
    await demo.encode(text)
    whole = time.perf_counter() - start
    seconds = []
    for _ in range(3):  # the machine may be busy
        start = time.perf_counter()
        with anyio.move_on_after(0.001) as scope:
            await demo.encode(text)
        assert scope.cancelled_caught
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < whole / 2


# ---- the context, and whose turn it is --------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hello world", "The capital of France. " * 500, "é" * 3000, "<|im_end|>" * 1000])
async def test_what_fits_is_not_refused_and_what_does_not_is(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode_now(text)
    assert await any_tokenizer.encode(text, context=len(ids) + 1) == ids
    with pytest.raises(ContextLengthError, match=f"maximum context length is {len(ids)} tokens"):
        await any_tokenizer.encode(text, context=len(ids))


@pytest.mark.parametrize("content", ["hi", "<|im_end|>" * 2000, "héllo <|im_start|> " * 200])
async def test_nor_is_a_chat(demo: Tokenizer, content: str) -> None:
    messages = [{"role": "user", "content": content}]
    ids = await demo.encode_chat(messages)
    assert await demo.encode_chat(messages, context=len(ids) + 1) == ids
    with pytest.raises(ContextLengthError):
        await demo.encode_chat(messages, context=len(ids))


class Tokenizing:
    """Records the texts that are tokenized, and holds up those longer than `most` characters."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.texts: list[str] = []
        self.begun = threading.Event()
        self.gate = threading.Event()
        encode = tokenizer._encode

        def held(backend: Any, text: str, *options: Any) -> list[int]:
            self.texts.append(text)
            if len(text) > most:
                self.begun.set()
                assert self.gate.wait(60)
            return encode(backend, text[:100], *options)

        monkeypatch.setattr(tokenizer, "_encode", held)


async def test_what_can_never_fit_is_not_tokenized(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizing = Tokenizing(demo, monkeypatch, most=0)
    with pytest.raises(ContextLengthError, match="at least"):
        await demo.encode("word " * 400_000, context=2048)
    for content in ("word " * 400_000, "<|im_start|>" * 100_000):
        with pytest.raises(ContextLengthError, match="at least"):
            await demo.encode_chat([{"role": "user", "content": content}], context=2048)
    assert tokenizing.texts == []


async def test_long_texts_do_not_stand_in_front_of_shorter_ones(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizing = Tokenizing(demo, monkeypatch, most=100_000)
    long, medium = "a" * 200_000, "b" * 20_000
    async with asyncio.timeout(60):
        longs = [asyncio.ensure_future(demo.encode(long)) for _ in range(8)]
        longs += [asyncio.ensure_future(demo.encode_chat([{"role": "user", "content": long}])) for _ in range(8)]
        try:
            await anyio.to_thread.run_sync(tokenizing.begun.wait)
            await demo.encode(medium)
            await demo.encode_chat([{"role": "user", "content": medium}])
            await demo.encode_chat([{"role": "user", "content": "hi"}])
            assert not any(one.done() for one in longs)
        finally:
            tokenizing.gate.set()
        await asyncio.gather(*longs)


async def test_long_chats_do_not_stand_in_front_of_shorter_ones_to_be_rendered(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if their texts are in other fields: marking them takes a second."""
    begun, gate, rendering = threading.Event(), threading.Event(), [0]
    render = demo._templates.render

    def held(messages: Any, *tools: Any, **options: Any) -> tuple[str, bool]:
        if messages[0]["content"] == "long":
            rendering[0] += 1
            begun.set()
            assert gate.wait(60)
        return render(messages, *tools, **options)

    monkeypatch.setattr(demo._templates, "render", held)
    text, chat = "<" * 200_000, [{"role": "user", "content": "long"}]
    async with asyncio.timeout(60):
        longs = [asyncio.ensure_future(demo.encode_chat([{**chat[0], "reasoning": text}])) for _ in range(8)]
        longs += [asyncio.ensure_future(demo.encode_chat(chat, [{"description": text}])) for _ in range(8)]
        longs += [asyncio.ensure_future(demo.encode_chat(chat, template_kwargs={"about": [text]})) for _ in range(8)]
        try:
            await anyio.to_thread.run_sync(begun.wait)
            for content in ("hi", "b" * 20_000):
                await demo.encode_chat([{"role": "user", "content": content}])
            assert rendering == [1]
        finally:
            gate.set()
        await asyncio.gather(*longs)


async def test_who_gives_up_in_the_queue_is_not_tokenized(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizing = Tokenizing(demo, monkeypatch, most=100_000)
    async with asyncio.timeout(60):
        first = asyncio.ensure_future(demo.encode("a" * 200_000))
        try:
            await anyio.to_thread.run_sync(tokenizing.begun.wait)
            with anyio.move_on_after(0.01):
                await demo.encode("b" * 200_000)
        finally:
            tokenizing.gate.set()
        await first
        await demo.encode("c" * 200_000)
    assert [text[0] for text in tokenizing.texts] == ["a", "c"]
