"""Draft heads in a running engine: an MTP layer of the checkpoint, and an EAGLE-3 head in a folder of its own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

import aengine
from aengine.errors import AengineError
from aengine.model.loading.hub import DEMO
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import write_head
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint

pytestmark = pytest.mark.anyio

VOCAB = 4096  # of the demo model's tokenizer
PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(5 + 11 * i)] for i in range(5)]
KNOBS = {"device": "cpu", "dtype": "float32", "progress": False, "max_model_len": 256, "page_size": 4}
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


@pytest.fixture(
    params=["qwen3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("deepseek-v3", "glm4-moe-qk-norm-groups"))]
)
def mtp(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    write_mtp_checkpoint(request.param, folder, vocab_size=VOCAB)
    return with_tokenizer(folder)


async def answers(folder: Path, speculation: str, **knobs: object) -> tuple[list[list[int]], int, str]:
    """The ids of greedy and of seeded answers, the number of steps, and the proposer that ran."""
    async with aengine.Engine(
        str(folder), speculation=speculation, **{**KNOBS, "max_num_seqs": 4, "max_step_tokens": 16, **knobs}
    ) as engine:
        found = [
            list(completion.token_ids)
            for params in (GREEDY, SEEDED)
            for completion in await asyncio.gather(
                *(engine.complete(prompt, max_tokens=40, ignore_eos=True, **params) for prompt in PROMPTS)
            )
        ]
        return found, engine.stats().steps, engine.stats().speculation


async def test_an_mtp_layer_changes_no_id_and_is_used_unless_the_knob_says_otherwise(mtp: Path) -> None:
    plain, steps, proposer = await answers(mtp, "off")
    drafted, fewer, by_itself = await answers(mtp, "auto")
    assert drafted == plain
    assert fewer < steps  # seeded draws of the target and of the layer share their noise, so some drafts are right
    assert (proposer, by_itself) == ("off", "mtp")


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{"draft_tokens": 1}, {"tensor_parallel_size": 2}, {"lookahead": False}])
async def test_neither_do_fewer_drafts_ranks_or_steps_one_by_one(tmp_path: Path, knobs: dict[str, object]) -> None:
    folder = tmp_path / "target"
    write_mtp_checkpoint("qwen3", folder, vocab_size=VOCAB)
    with_tokenizer(folder)
    assert (await answers(folder, "mtp", **knobs))[0] == (await answers(folder, "off"))[0]


@pytest.mark.parametrize(
    "settings",
    [
        HeadSettings(target_vocab=VOCAB, draft_vocab=1000, taps=(0, 1, 2)),
        HeadSettings(target_vocab=VOCAB, draft_vocab=VOCAB, taps=(0, 2), speculators=True, layers=2),
        HeadSettings(target_vocab=VOCAB, draft_vocab=VOCAB, taps=(0, 2), speculators=True, mask=7),
    ],
    ids=["plain", "speculators", "masks"],
)
async def test_an_eagle3_head_changes_no_id(tmp_path: Path, settings: HeadSettings) -> None:
    target = tmp_path / "target"
    write_mtp_checkpoint("qwen3", target, vocab_size=VOCAB)
    with_tokenizer(target)
    head = write_head(settings, tmp_path / "head")
    drafted, _, proposer = await answers(target, f"eagle3={head}")
    assert drafted == (await answers(target, "off"))[0]
    assert proposer == "eagle3"


async def test_a_checkpoint_without_the_layer_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    write_mtp_checkpoint("qwen3", folder, vocab_size=VOCAB)
    with_tokenizer(folder)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("mtp_num_hidden_layers", "none"))
    with pytest.raises(AengineError, match=r"speculation: mtp cannot be used, because .* write ngram, auto or off"):
        await answers(folder, "mtp")


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "draft"])
async def test_a_path_that_cannot_be_read_is_an_error_of_the_knob(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    write_mtp_checkpoint("qwen3", folder, vocab_size=VOCAB)
    with_tokenizer(folder)
    (tmp_path / "gguf").mkdir()
    for path in (tmp_path / "head.gguf", tmp_path / "gguf" / "head.gguf", tmp_path / "weights"):
        path.touch()
    for name, error in (
        ("nowhere", "there is no folder"),
        ("weights", "is a file; give the folder"),
        ("head.gguf", "is in llama.cpp's GGUF"),
        ("gguf", "holds head.gguf, llama.cpp's GGUF"),
    ):
        with pytest.raises(AengineError, match=f"^speculation: .*{error}") as refused:
            await answers(folder, f"{kind}={tmp_path / name}")
        assert str(tmp_path / name) in str(refused.value)
