"""A slow mask is filled while steps run, and is the same mask."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from aengine.model.loading.hub import resolve_model
from aengine.requests.structured import Structured
from aengine.text.grammar import grammars as grammars_module
from aengine.text.grammar import matcher as matcher_module
from aengine.text.grammar.grammars import Grammars
from aengine.text.grammar.matcher import SLOW_TOKENS, Matcher, consume_noted
from aengine.text.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

WORDS = Structured(regex="[a-z ]{1,40}")


def ambiguous(ways: int) -> Structured:
    """Return a grammar whose texts may match any of many rules."""
    rules = "\n".join(f'r{i}: C* "{i}"' for i in range(ways))
    return Structured(grammar=f"start: {' | '.join(f'r{i}' for i in range(ways))}\nC: /[a-zA-Z .,]/\n{rules}")


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(resolve_model(None, None))


@pytest.fixture
def grammars(demo: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(demo, demo.vocab_size, (4091, 4089))
    yield grammars
    grammars.close()


async def prepared(grammars: Grammars, matcher: Matcher) -> None:
    done = asyncio.Event()
    grammars.prepare(matcher, done.set)
    async with asyncio.timeout(30):
        await done.wait()


async def test_a_slow_matcher_is_late_until_its_mask_is_there(
    grammars: Grammars, demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = await grammars.matcher(WORDS)
    assert not quick.slow
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", -1.0)
    slow = await grammars.matcher(Structured(regex="([a-z ]){1,40}"))
    assert slow.slow
    assert not slow.late  # the first mask comes with the grammar
    for token in demo.encode_now("a cat and a dog"):
        masks = (await grammars.fill([quick, slow])).bits
        assert np.array_equal(masks[0], masks[1])
        assert slow.late
        quick.accept(token)
        slow.accept(token)
        assert slow.late
        await prepared(grammars, slow)
        assert not slow.late


async def test_a_step_that_needs_the_mask_waits_for_it(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted output comes back with a prefill, which does not wait for its mask."""
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", -1.0)
    slow = await grammars.matcher(WORDS)
    (first,) = (await grammars.fill([slow])).bits
    grammars.prepare(slow, lambda: None)
    (again,) = (await grammars.fill([slow])).bits
    assert np.array_equal(first, again)
    (unprepared,) = (await grammars.fill([slow])).bits
    assert np.array_equal(first, unprepared)


async def test_who_is_quick_again_is_so_after_a_while(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(matcher_module, "SLOW_SECONDS", -1.0)
        matcher = await grammars.matcher(WORDS)
        assert matcher.copy().slow
    await grammars.fill([matcher])  # the mask that was ready
    for _ in range(SLOW_TOKENS):
        assert matcher.late
        await prepared(grammars, matcher)
        await grammars.fill([matcher])
    assert not matcher.slow
    assert not matcher.late


async def test_one_slow_grammar_among_many_is_found(
    grammars: Grammars, demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(matcher_module, "SLOW_SECONDS", 60.0)
        slow = await grammars.matcher(ambiguous(300))
        others = [await grammars.matcher(WORDS) for _ in range(5)]
    monkeypatch.setattr(grammars_module, "SLOW_SECONDS", 0.0)  # whatever else uses the processor
    for token in demo.encode_now("a cat and a dog"):
        await grammars.fill([*others, slow])
        for matcher in (*others, slow):
            matcher.accept(token)
    assert slow.slow
    assert not any(other.slow for other in others)


async def test_a_grammar_that_is_slow_from_the_start_is_known_to_be(grammars: Grammars) -> None:
    assert (await grammars.matcher(ambiguous(300))).slow
    assert not (await grammars.matcher(ambiguous(3))).slow


class Ticks(threading.Thread):
    """Counts how often another thread gets the interpreter: about every millisecond if possible."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.001):
            self.count += 1

    def __enter__(self) -> Ticks:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()


async def test_a_token_that_takes_long_holds_nobody_else(grammars: Grammars, demo: Tokenizer) -> None:
    """The token may belong to any of many rules, and each is checked."""
    ways = " | ".join(f'e "{chr(97 + number % 26)}{number}" e' for number in range(400))
    tries: list[tuple[float, int]] = []
    # the machine may be busy
    while len(tries) < 6 and not any(took > 0.01 and ticks > took / 0.01 for took, ticks in tries):
        matcher = await grammars.matcher(Structured(grammar=f"start: e\ne: {ways} | /[a-z0-9 ]/"))
        longest, ticks = 0.0, 0
        for character in "aa0":
            matcher.accept(demo.encode_now(character)[0])
            with Ticks() as others:
                begin = time.monotonic()
                consume_noted([matcher], grammars._executor, grammars._in_error)
                took = time.monotonic() - begin
            if took > longest:
                longest, ticks = took, others.count
            matcher.fill(np.empty(grammars.words, dtype=np.int32))
        tries.append((longest, ticks))
    assert any(took > 0.01 and ticks > took / 0.01 for took, ticks in tries), tries


async def test_a_grammar_that_was_slow_once_is_so_for_whoever_comes_next(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = Structured(regex="[a-z ]{1,39}")
    matcher = await grammars.matcher(pattern)
    assert not matcher.slow
    await grammars.fill([matcher])  # the mask that was ready
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", -1.0)
    await grammars.fill([matcher])
    assert (await grammars.matcher(pattern)).slow
