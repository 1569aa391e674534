"""Drafts at the end of the context, where a page may reach beyond the last position."""

from __future__ import annotations

import pytest

import aengine
from aengine.model.loading.hub import DEMO

pytestmark = pytest.mark.anyio
PROMPT = [5] * 20


@pytest.mark.parametrize("longest", [66, 80])
async def test_drafts_beyond_the_last_position_change_nothing(longest: int) -> None:
    """Rotations are known for `max_model_len` positions. Pages of 16 tokens reach beyond 66."""
    answers = []
    for speculation in ("off", "mtp", f"draft={DEMO}"):
        async with aengine.Engine(
            max_model_len=longest,
            speculation=speculation,
            draft_tokens=16,
            device="cpu",
            progress=False,
            kv_cache_gib=0.1,
        ) as engine:
            answer = await engine.complete(PROMPT, max_tokens=longest - len(PROMPT), temperature=0, ignore_eos=True)
        answers.append(answer.choices[0].token_ids)
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == longest - len(PROMPT)
