"""Answers with speculation are those without it, whatever is drafted, for all parameters and knobs.

Requests run together, so a step has rows with many, few and no drafts, prompts, choices that fork and masks.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aengine
from aengine.types import Completion
from tests.engine.speculation.answers import (
    KNOBS,
    REQUESTS,
    answers,
    assert_same,
    book_of,
    speculating,
    without_speculation,
)
from tests.engine.speculation.replay import Book, Drafts

pytestmark = pytest.mark.anyio

PREEMPTING: dict[str, Any] = {"num_pages": 60, "page_size": 3, "max_model_len": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "small pool, preempting": PREEMPTING,
    "small pool, no lookahead": PREEMPTING | {"lookahead": False},
    "no lookahead": {"lookahead": False},
    "small steps": {"max_step_tokens": 8, "max_num_seqs": 8},
    "steps of 40": {"max_step_tokens": 40},
    "few rows": {"max_num_seqs": 3},
    "4 rows of mixed lengths": {"max_num_seqs": 4, "max_step_tokens": 12, "page_size": 4},
    "no prefix cache": {"prefix_cache": False},
    "pages of 1": {"page_size": 1},
    "pages of 128": {"page_size": 128},
    "2 ranks": {"tensor_parallel_size": 2},
    "2 ranks, preempting": PREEMPTING | {"tensor_parallel_size": 2},
    "host cache": PREEMPTING | {"host_cache_gib": 0.01},
}
QUICK = {"as it comes": (0.9, 4), "small pool, preempting": (0.5, 4), "2 ranks": (1.0, 7)}
DRAFTS = [(0.0, 4), (0.5, 8), (0.8, 1), (0.9, 4), (1.0, 15)]  # the share of right ones, and the most of a row
NGRAMS: dict[str, dict[str, Any]] = {
    "small pool, preempting": {"draft_tokens": 8},
    "no lookahead": {"draft_tokens": 1},
    "small steps": {"draft_tokens": 3},
    "2 ranks": {"draft_tokens": 16},
    "pages of 1": {"draft_tokens": 5},
}


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return asyncio.run(without_speculation(REQUESTS))


@pytest.fixture(scope="module")
def expected_in_fp8() -> list[Completion]:
    return asyncio.run(without_speculation(REQUESTS, kv_cache_dtype="fp8"))


async def compare(expected: list[Completion], drafts: Drafts, **knobs: Any) -> None:
    drafts.book = book_of(REQUESTS, expected)
    async with speculating(drafts, **knobs) as engine:
        found = await answers(engine, REQUESTS)
        stats = engine.stats()
    assert (stats.preemptions > 0) == ("num_pages" in knobs)
    assert_same(found, expected, REQUESTS)
    assert 0 < stats.drafted_tokens <= drafts.verified  # of every rank, and of steps whose tokens are dropped
    assert (stats.accepted_tokens > 0) == (drafts.right > 0)
    if drafts.right == 1.0:
        assert stats.accepted_tokens > 0.8 * stats.drafted_tokens  # an output's last drafts come too late


@pytest.mark.parametrize("name", QUICK)
async def test_answers_are_those_without_speculation(name: str, expected: list[Completion]) -> None:
    await compare(expected, Drafts(Book(), *QUICK[name]), **VARIANTS[name])


@pytest.mark.slow
@pytest.mark.turns("drafts")
@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
async def test_answers_with_any_number_of_drafts(
    name: str, drafts: tuple[float, int], expected: list[Completion]
) -> None:
    """Numbers and shares of right drafts take turns: one for each variant."""
    await compare(expected, Drafts(Book(), *drafts), **VARIANTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["as it comes", "small pool, preempting", "2 ranks"])
async def test_answers_with_keys_and_values_in_fp8(name: str, expected_in_fp8: list[Completion]) -> None:
    await compare(expected_in_fp8, Drafts(right=0.8), kv_cache_dtype="fp8", **VARIANTS[name])


async def test_drafts_are_counted_as_they_are_verified(expected: list[Completion]) -> None:
    drafts = Drafts(book_of(REQUESTS, expected), right=0.7)
    async with speculating(drafts) as engine:
        await answers(engine, REQUESTS[:1])  # ends by length, so no step draws tokens that are dropped
        stats = engine.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens) == (drafts.verified, drafts.accepted)
    assert sum(stats.accepted_by_position) == stats.accepted_tokens
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("name", ["as it comes", *(pytest.param(name, marks=pytest.mark.slow) for name in NGRAMS)])
async def test_answers_with_drafts_from_ngrams(name: str, expected: list[Completion]) -> None:
    async with aengine.Engine(**KNOBS | {"speculation": "ngram"} | VARIANTS[name] | NGRAMS.get(name, {})) as engine:
        found = await answers(engine, REQUESTS)
        stats = engine.stats()
    assert_same(found, expected, REQUESTS)
    assert stats.accepted_tokens > 0
