"""Rows with and without adapters share a draft head, which no adapter changes: drafts never change what is written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aengine
from tests.engine.speculation.test_heads import KNOBS, PROMPTS, VOCAB, with_tokenizer
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import write_head
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint
from tests.model.lora.adapters import ALL, write_adapter

pytestmark = pytest.mark.anyio

HEAD = HeadSettings(target_vocab=VOCAB, draft_vocab=VOCAB, taps=(0, 1, 2), own_head=False)


@pytest.mark.parametrize("kind", ["ngram", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mtp", "eagle3"))])
async def test_rows_with_and_without_adapters_share_a_proposer(tmp_path: Path, kind: str) -> None:
    """The adapters change the embedding's and the output matrix's target, which heads use without them."""
    model = write_mtp_checkpoint("qwen3", tmp_path / "target", vocab_size=VOCAB)
    folder = with_tokenizer(tmp_path / "target")
    for seed, name in enumerate("ab"):
        write_adapter(model, tmp_path / name, seed, target_modules=[*ALL, "lm_head"] if name == "a" else ALL)
    head = write_head(HEAD, tmp_path / "head")
    lora = {name: str(tmp_path / name) for name in "ab"}

    async def answers(speculation: str) -> tuple[list[tuple[int, ...]], int]:
        knobs = {**KNOBS, "max_num_seqs": 8, "max_step_tokens": 24, "lora": lora, "speculation": speculation}
        async with aengine.Engine(str(folder), **knobs) as engine:
            found = await asyncio.gather(
                *(
                    engine.complete(prompt, adapter=adapter, max_tokens=30, ignore_eos=True, **params)
                    for prompt in PROMPTS
                    for adapter in (None, "a", "b")
                    for params in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 2})
                )
            )
            return [tuple(one.token_ids) for one in found], engine.stats().accepted_tokens

    plain, none = await answers("off")
    drafted, accepted = await answers(f"eagle3={head}" if kind == "eagle3" else kind)
    assert drafted == plain
    assert len(set(plain[:6])) > 3
    assert (none, accepted > 0) == (0, True)
