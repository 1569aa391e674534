"""Heads draft the same, however a prompt was computed: at once, in chunks, or found in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import aengine
from aengine.runtime.speculation.base import PagedProposer
from aengine.runtime.speculation.blocks import BlockProposer
from aengine.runtime.speculation.draft_model import DraftModelProposer
from aengine.runtime.speculation.heads import HeadProposer
from tests.engine.speculation.test_heads import KNOBS, VOCAB, with_tokenizer
from tests.model.drafting.dflash_reference import DFlashSettings
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import write_head
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint

pytestmark = pytest.mark.anyio

HEADS = {
    "eagle3": HeadSettings(target_vocab=VOCAB, draft_vocab=1000, taps=(0, 1, 2)),
    "peagle": HeadSettings(target_vocab=VOCAB, draft_vocab=VOCAB, taps=(0, 2), speculators=True, mask=7),
    "dflash": DFlashSettings(target_vocab=VOCAB, draft_vocab=VOCAB, mask=5, taps=(1, 2)),
}
PROMPT = [(37 * i * i + 11 * i) % 3000 + 300 for i in range(46)]
LATER = PROMPT[::-1][:9]

Drafts = list[list[int]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """The drafts that proposers make, one entry for each step. There must be one row."""
    found: Drafts = []

    def recording(kind: type[PagedProposer]) -> None:
        usual = kind._draft

        def draft(proposer: PagedProposer, *given: Any) -> Tensor | None:
            drafts = usual(proposer, *given)
            if drafts is not None:
                found.append(drafts[:, 0].tolist())
            return drafts

        monkeypatch.setattr(kind, "_draft", draft)

    for kind in (HeadProposer, BlockProposer, DraftModelProposer):
        recording(kind)
    return found


@pytest.fixture(params=["mtp", "draft", *HEADS])
def speculation(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A model, and the knob `speculation`."""
    kind, target = request.param, tmp_path / "target"
    write_mtp_checkpoint("qwen3", target, vocab_size=VOCAB)
    with_tokenizer(target)
    if kind in HEADS:
        head = write_head(HEADS[kind], tmp_path / "head")
        return target, f"{'dflash' if kind == 'dflash' else 'eagle3'}={head}"
    return target, f"draft={target}" if kind == "draft" else kind


async def drafts_of(
    made: Drafts, speculation: tuple[Path, str], prompts: Sequence[list[int]], is_chat: bool, **knobs: object
) -> tuple[list[Drafts], list[int]]:
    """Return the drafts of each answer, and the numbers of cached tokens.

    is_chat: each prompt follows what was said before.
    """
    found, cached = [], []
    options = {**KNOBS, "max_num_seqs": 1, "draft_tokens": 3, "lookahead": False, **knobs}
    async with aengine.Engine(str(speculation[0]), speculation=speculation[1], **options) as engine:
        history: list[int] = []
        for said in prompts:
            made.clear()
            history = history + said if is_chat else said
            answer = await engine.complete(history, max_tokens=14, temperature=0, ignore_eos=True)
            history = [*history, *answer.token_ids]
            found.append(list(made))
            cached.append(answer.usage.cached_tokens)
    return found, cached


async def test_chunks_and_hits_of_a_chat_change_no_draft(made: Drafts, speculation: tuple[Path, str]) -> None:
    """A chunk ends before the token after it is computed. So does a cached prefix."""
    turns = [PROMPT, LATER, LATER]
    whole, none = await drafts_of(made, speculation, turns, True, prefix_cache=False)
    assert none == [0, 0, 0]
    assert all(len(drafts) > 3 for drafts in whole)
    assert (await drafts_of(made, speculation, turns, True, prefix_cache=False, max_step_tokens=7))[0] == whole
    hits, cached = await drafts_of(made, speculation, turns, True)
    assert all(cached[1:])
    assert hits == whole


async def test_a_hit_of_another_chats_pages_changes_no_draft(made: Drafts, speculation: tuple[Path, str]) -> None:
    """The chats differ in the middle of a page."""
    prompts = [PROMPT, PROMPT[:42] + LATER, PROMPT[:23] + LATER]
    whole, _ = await drafts_of(made, speculation, prompts, False, prefix_cache=False)
    hits, cached = await drafts_of(made, speculation, prompts, False)
    assert cached == [0, 40, 20]
    assert hits == whole
