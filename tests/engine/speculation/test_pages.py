"""Drafts do not depend on the size of pages: the keys of drafts after a row's last token have pages, too."""

from __future__ import annotations

import asyncio

import pytest

import aengine
from aengine.model.loading.hub import DEMO

PROMPTS = ["Once upon a time", "def f(x):", "The capital of France"]
Counts = tuple[int, int, int]


async def counts(page_size: int) -> tuple[list[tuple[int, ...]], Counts]:
    """Return the ids of the demo model's answers, its drafts, how many were accepted, and the number of steps."""
    async with aengine.Engine(
        str(DEMO), device="cpu", dtype="float32", page_size=page_size, speculation="mtp", draft_tokens=5,
        max_num_seqs=4, torch_threads=1, progress=False,
    ) as engine:  # fmt: skip
        work = [engine.complete(prompt, max_tokens=60, temperature=0, ignore_eos=True) for prompt in PROMPTS]
        ids = [completion.token_ids for completion in await asyncio.gather(*work)]
        stats = engine.stats()
        engine.check_integrity()
    return ids, (stats.drafted_tokens, stats.accepted_tokens, stats.steps)


@pytest.mark.slow
@pytest.mark.anyio
async def test_small_pages_accept_as_many_drafts_as_large_ones() -> None:
    small, large = await counts(2), await counts(128)
    assert small == large
