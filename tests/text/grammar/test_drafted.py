"""Masks after drafts are those after the same tokens of an output, and the matcher stays where it was."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from aengine.model.loading.hub import resolve_model
from aengine.requests.structured import Structured
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.grammar import grammars as grammars_module
from aengine.text.grammar import matcher as matcher_module
from aengine.text.grammar.calls import CallGrammar
from aengine.text.grammar.grammars import Grammars
from aengine.text.grammar.matcher import Mask, Matcher
from aengine.text.tokens.tokenizer import Tokenizer
from tests.engine.schemas import schema

pytestmark = pytest.mark.anyio

DRAFTS = 4
EOS = 4091
WORDS = Structured(regex="[a-z ]{1,40}")
WITHOUT_ROLLBACK = Structured(grammar='start: x y\nx[max_tokens=5]: /[a-z]*/\ny: "!"')


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(resolve_model(None, None))


@pytest.fixture
def grammars(demo: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(demo, demo.vocab_size, (EOS, 4089))
    yield grammars
    grammars.close()


def tokens_of(mask: Mask) -> list[int]:
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()


def forms(demo: Tokenizer) -> list[Structured]:
    calls = CallGrammar([CallableTool("f"), CallableTool("g")], FORMATS["hermes"], tokens=demo.answer_format.markers)
    schemas = [Structured(json=schema(seed), thought=("never", "possible", "open")[seed % 3]) for seed in range(24)]
    return [
        *schemas,
        WORDS,
        Structured(choice=("yes", "no", "yesterday")),
        Structured(regex="(ab?){1,9}", thought="open", calls=calls.rules()),
        Structured(grammar=calls.forced("possible")),
        Structured(grammar=calls.within_text("possible")),
        Structured(grammar='start: x /[0-9]/\nx[suffix="!"]: /.*/'),
        WITHOUT_ROLLBACK,
    ]


async def masks_after(grammars: Grammars, matcher: Matcher, tokens: list[int]) -> list[Mask]:
    """Return the mask after the output, and after each further token, up to one that the grammar refuses."""
    twin = matcher.copy()
    masks = [(await grammars.fill([twin])).bits[0]]
    for token in tokens:
        if token not in tokens_of(masks[-1]) or token in grammars.eos_ids:
            break
        twin.accept(token)
        masks.append((await grammars.fill([twin])).bits[0])
    return masks


async def draft(grammars: Grammars, matcher: Matcher, rng: random.Random) -> list[int]:
    """Return drafts that the grammar mostly allows. Marker tokens are likely."""
    twin, drafts = matcher.copy(), list[int]()
    for _ in range(rng.randint(0, DRAFTS)):
        allowed = tokens_of((await grammars.fill([twin])).bits[0])
        drafts.append(max(allowed) if rng.random() < 0.2 else rng.choice(allowed))
        twin.accept(drafts[-1])
    if drafts and rng.random() < 0.3:
        drafts[rng.randrange(len(drafts))] = rng.randrange(300, 4000)
    return drafts


@pytest.mark.parametrize(
    "measures", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["together", "each measured"]
)
async def test_masks_after_drafts_are_those_after_tokens(
    grammars: Grammars, demo: Tokenizer, measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of many grammars, all filled in the same call, some without drafts."""
    if measures:
        monkeypatch.setattr(grammars_module, "MEASURE_EVERY", 0)
        monkeypatch.setattr(grammars_module, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", 60.0)  # other work may use the processor
    rng = random.Random(7)
    matchers = [await grammars.matcher(form) for form in forms(demo)]
    judges = [matcher.copy() for matcher in matchers]
    usable = 0
    for _ in range(10):
        drafts = [await draft(grammars, judge, rng) for judge in judges]
        expected = [await masks_after(grammars, judge, own) for judge, own in zip(judges, drafts, strict=True)]
        masks = await grammars.fill(matchers, drafts)
        place = 0
        for own, wanted, count, matcher in zip(drafts, expected, masks.usable, matchers, strict=True):
            assert matcher.error is None
            assert count == (len(wanted) - 1 if matcher.takes_drafts else 0)
            for found, right in zip(masks.bits[place : place + count + 1], wanted, strict=False):
                assert np.array_equal(found, right)
            assert (masks.bits[place + count + 1 : place + len(own) + 1] == -1).all()
            place += 1 + len(own)
            usable += count
        assert place == len(masks.bits)
        for matcher, judge, (first, *_) in zip(matchers, judges, expected, strict=True):
            token = rng.choice(tokens_of(first))
            if token not in grammars.eos_ids:
                matcher.accept(token)
                judge.accept(token)
    assert usable > 150


async def test_drafts_of_one_output_alone(grammars: Grammars, demo: Tokenizer) -> None:
    a, b, c = (demo.encode_now(letter)[0] for letter in "abc")
    matcher = await grammars.matcher(Structured(regex="abc|acb"))
    masks = await grammars.fill([None, matcher, None], [[], [a, b, b, c], [a]])
    assert masks.usable == [0, 2, 0]
    assert [tokens_of(mask) for mask in masks.bits[1:4]] == [tokens_of(masks.bits[1]), [b, c], [c]]
    assert (masks.bits[[0, 4, 5, 6, 7]] == -1).all()


async def test_a_completed_grammar_allows_only_the_end(grammars: Grammars, demo: Tokenizer) -> None:
    yes = demo.encode_now("yes")
    matcher = await grammars.matcher(Structured(choice=("yes",)))
    masks = await grammars.fill([matcher], [[*yes, EOS, yes[0]]])
    assert masks.usable == [len(yes)]
    assert tokens_of(masks.bits[len(yes)]) == [4089, EOS]
    assert (masks.bits[len(yes) + 1 :] == -1).all()


@pytest.mark.parametrize("unusual", [-1, 2**40, 4095 + 1, EOS], ids=["none", "huge", "past the vocabulary", "the end"])
async def test_no_mask_follows_a_draft_that_continues_no_output(
    grammars: Grammars, demo: Tokenizer, unusual: int
) -> None:
    (a,) = demo.encode_now("a")
    for drafts, usable in (([unusual, a], 0), ([a, unusual, a], 1)):
        matcher = await grammars.matcher(WORDS)
        masks = await grammars.fill([matcher], [drafts])
        assert masks.usable == [usable]
        assert (masks.bits[usable + 1 :] == -1).all()
        assert matcher.error is None
        assert matcher.takes_drafts


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "with others"])
async def test_an_output_that_drafts_have_broken_continues_without_drafts(
    grammars: Grammars, demo: Tokenizer, others: int
) -> None:
    """The library cannot take back tokens of this grammar."""
    tokens = demo.encode_now("a cat".replace(" ", ""))
    matchers = [await grammars.matcher(form) for form in [WITHOUT_ROLLBACK] + [WORDS] * others]
    broken, judge = matchers[0], matchers[0].copy()
    for matcher in (broken, judge):
        matcher.accept(tokens[0])
    assert broken.takes_drafts
    masks = await grammars.fill(matchers, [tokens[1:2]] * len(matchers))
    assert masks.usable == [0] + [1] * others
    assert broken.error is None
    assert not broken.takes_drafts
    assert not broken.copy().takes_drafts
    for token in tokens[1:]:
        found, right = (await grammars.fill([broken, judge])).bits
        assert np.array_equal(found, right)
        for matcher in (broken, judge):
            matcher.accept(token)


async def test_slow_masks_are_not_computed_for_drafts(
    grammars: Grammars, demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first mask shows that they are slow."""
    (a,) = demo.encode_now("a")
    matcher = await grammars.matcher(WORDS)
    matcher.accept(a)
    assert matcher.takes_drafts
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", -1.0)
    masks = await grammars.fill([matcher], [[a, a]])
    assert masks.usable == [0]
    assert matcher.late
    assert not matcher.takes_drafts


async def test_slow_masks_after_drafts_make_an_output_slow(
    grammars: Grammars, demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = demo.encode_now("a")
    matcher = await grammars.matcher(WORDS)  # with its first mask
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", -1.0)
    masks = await grammars.fill([matcher], [[a, a]])
    assert masks.usable == [2]
    assert matcher.slow
