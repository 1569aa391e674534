"""Turns prompts into ids without holding the event loop."""

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
from tokenizers import AddedToken

from aengine.errors import ContextLengthError, InvalidRequestError
from aengine.text.tokens.tokenizer import INLINE_CHARACTERS, Tokenizer
from tests.text.text_families import byte_fallback_backend
from tests.text.tokens.texts import TEXTS

pytestmark = pytest.mark.anyio


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
