"""DFlash heads in a running engine: they change no id, whatever they draft."""

from __future__ import annotations

from pathlib import Path

import pytest

import aengine
from aengine.errors import AengineError
from tests.engine.speculation.test_heads import GREEDY, KNOBS, SEEDED, VOCAB, answers, with_tokenizer
from tests.model.drafting.dflash_reference import DFlashSettings
from tests.model.drafting.head_reference import write_head
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint

pytestmark = pytest.mark.anyio

HEAD = DFlashSettings(target_vocab=VOCAB, draft_vocab=VOCAB, mask=5, taps=(1, 2))
MAPPED = DFlashSettings(target_vocab=VOCAB, draft_vocab=1000, mask=5, taps=(2,), speculators=True, own_head=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_mtp_checkpoint("qwen3", folder, vocab_size=VOCAB)
    return with_tokenizer(folder)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(HEAD, tmp_path_factory.mktemp("head"))


async def test_a_head_changes_no_id_and_is_counted(target: Path, head: Path) -> None:
    plain, steps, _ = await answers(target, "off")
    drafted, fewer, proposer = await answers(target, f"dflash={head}")
    assert drafted == plain
    assert fewer < steps  # seeded draws of the target and of the head share their noise, so some drafts are right
    assert proposer == "dflash"


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [{"tensor_parallel_size": 2}, {"lookahead": False, "draft_tokens": 1}, {"num_pages": 40, "max_model_len": 128}],
    ids=["2 ranks", "one by one", "preempting"],
)
async def test_neither_do_ranks_steps_one_by_one_or_preemption(
    target: Path, head: Path, knobs: dict[str, object]
) -> None:
    assert (await answers(target, f"dflash={head}", **knobs))[0] == (await answers(target, "off"))[0]


async def test_a_head_with_fewer_tokens_than_the_model(target: Path, tmp_path: Path) -> None:
    folder = write_head(MAPPED, tmp_path)
    assert (await answers(target, f"dflash={folder}"))[0] == (await answers(target, "off"))[0]


async def test_a_cached_prefix_holds_what_the_head_keeps(target: Path, head: Path) -> None:
    """With a hit, the head drafts as well as without."""
    prompt = [(5 * i) % 90 + 1 for i in range(50)]
    async with aengine.Engine(str(target), speculation=f"dflash={head}", **KNOBS) as engine:
        found, cached = [], []
        for _ in range(2):
            before = engine.stats()
            answer = await engine.complete(prompt, max_tokens=60, ignore_eos=True, **SEEDED)
            after = engine.stats()
            found.append((answer.token_ids, after.accepted_tokens - before.accepted_tokens))
            cached.append(answer.usage.cached_tokens)
    assert cached[0] == 0 < cached[1]
    assert found[0] == found[1]
    assert found[0][1] > 0


async def test_the_default_is_a_whole_block_and_more_drafts_are_refused(target: Path, head: Path) -> None:
    async with aengine.Engine(str(target), speculation=f"dflash={head}", **KNOBS) as engine:
        await engine.complete([1, 2, 3], max_tokens=2, ignore_eos=True, **GREEDY)
        await engine.complete([1, 2, 3], max_tokens=40, ignore_eos=True, **GREEDY)
        assert engine.stats().drafted_tokens > 0
    with pytest.raises(AengineError, match=r"^draft_tokens: is 6, the head drafts at most 5; lower it"):
        await answers(target, f"dflash={head}", draft_tokens=6)
