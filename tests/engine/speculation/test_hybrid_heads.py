"""Models with recurrent layers and every proposer: the ids are those without speculation."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import aengine
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.speculation.base import NO_PROPOSER
from aengine.runtime.speculation.choose import choose_proposer
from aengine.types import Completion
from tests.engine.speculation.answers import Request, answers, assert_same
from tests.engine.speculation.test_heads import VOCAB, with_tokenizer
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import write_head
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint

pytestmark = pytest.mark.anyio

SLOW = pytest.mark.slow
HEAD = HeadSettings(target_vocab=VOCAB, draft_vocab=VOCAB, taps=(0, 1, 2), own_head=False)
KNOBS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "progress": False,
    "torch_threads": 1,
    "kv_cache_gib": 0.05,
    "max_num_seqs": 8,
    "max_model_len": 190,
    "page_size": 4,
}
SHARED = [(5 * i) % 90 + 1 for i in range(70)]  # states are kept after 64 tokens
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "n": 3, "logprobs": 1},
    {"temperature": 0, "allowed_token_ids": [300, 301]},  # so that n-grams repeat themselves
]


def requests() -> list[Request]:
    """Return eight requests. The prompts of half of them begin with `SHARED`."""
    tails = [[(7 * i + 3 * j) % 90 + 1 for j in range(2 + 9 * i)] for i in range(8)]
    prompts = [SHARED[: 70 * (i % 2)] + tail for i, tail in enumerate(tails)]
    return [(prompt, {"max_tokens": 24, "ignore_eos": True, **KINDS[i // 2]}) for i, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Target:
    """A checkpoint with an MTP layer, an EAGLE-3 head for it, and answers without speculation."""

    folder: Path
    head: Path
    expected: list[Completion]

    def engine(self, proposer: str, **knobs: Any) -> aengine.Engine:
        speculation = f"eagle3={self.head}" if proposer == "eagle3" else proposer
        return aengine.Engine(str(self.folder), **{**KNOBS, "speculation": speculation, **knobs})


@pytest.fixture(scope="module", params=["qwen3-next", pytest.param("qwen3-5-wrapped", marks=SLOW)])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp(request.param)
    write_mtp_checkpoint(request.param, folder / "target", vocab_size=VOCAB)
    target = Target(with_tokenizer(folder / "target"), write_head(HEAD, folder / "head"), [])

    async def ask() -> None:
        async with target.engine("off", prefix_cache=False) as engine:
            target.expected.extend(await answers(engine, requests()))

    asyncio.run(ask())
    return target


VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunks of 7": {"max_step_tokens": 7 + 8},
    "preempting": {"num_pages": 60},
    "two ranks": {"tensor_parallel_size": 2},
    "no lookahead": {"lookahead": False},
    "one draft": {"draft_tokens": 1},
    "sixteen drafts": {"draft_tokens": 16},
}


CASES = [
    ("mtp", "as it comes"),
    *(pytest.param(proposer, "as it comes", marks=SLOW) for proposer in ("eagle3", "ngram")),
    *(pytest.param("mtp", name, marks=SLOW) for name in VARIANTS if name != "as it comes"),
    *(pytest.param(proposer, "preempting", marks=SLOW) for proposer in ("eagle3", "ngram")),
]


@pytest.mark.turns("target")
@pytest.mark.parametrize(("proposer", "name"), CASES)
async def test_a_proposer_changes_no_id(proposer: str, name: str, target: Target) -> None:
    """The second round continues from kept states. The models take turns: one for each slow case."""
    async with target.engine(proposer, **VARIANTS[name]) as engine:
        for _ in range(2):
            assert_same(await answers(engine, requests()), target.expected, requests())
        stats = engine.stats()
    assert stats.speculation == proposer
    assert stats.drafted_tokens > stats.accepted_tokens > 0
    assert stats.hit_rate > 0
    assert stats.preemptions > 0 or name != "preempting"


async def test_the_mtp_layer_is_used_without_being_asked_for(target: Target) -> None:
    async with target.engine("auto") as engine:
        assert engine.stats().speculation == "mtp"


@pytest.mark.parametrize("kind", ["ngram", "mtp"])
def test_on_a_gpu_speculation_is_off_unless_it_is_asked_for(
    kind: str, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    model, gpu = ModelConfig.from_folder(target.folder), torch.device("cuda")
    with caplog.at_level(logging.INFO, logger="aengine"):
        assert choose_proposer(EngineConfig(), model, gpu, target.folder) == (model, NO_PROPOSER)
    line = "speculation: off (on a GPU, no model drafts unless the knob speculation asks for it)"
    assert [record.getMessage() for record in caplog.records] == [line]
    choice = choose_proposer(EngineConfig(speculation=kind), model, gpu, target.folder)[1]
    assert choice.name == kind
    assert "whole answers were not tested on a GPU" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
async def test_chunks_may_end_at_any_offset(cut: int, target: Target) -> None:
    """Prompts that are alone are cut into chunks of `cut` tokens."""
    asked, expected = requests()[3], target.expected[3]
    async with target.engine("mtp", max_step_tokens=cut, max_num_seqs=1) as engine:
        assert_same(await answers(engine, [asked]), [expected], [asked])
