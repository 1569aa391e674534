"""Replayed steps with drafts give the ids of steps without graphs and without drafts. The graphs run on the CPU."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # comes with the runner's kernels

import aengine
from aengine.kernels.decodes import torch_decodes
from aengine.kernels.delta.torch_delta import TorchDelta
from aengine.runtime.cuda.decode_graphs import DecodeGraphs
from aengine.runtime.cuda.decode_shapes import DRAFTED_ROWS, MOST_PLACES, DecodeShape, drafted_shapes, graph_sizes
from aengine.runtime.cuda.runner import GraphedExecutor
from aengine.runtime.runner import CpuRunner
from aengine.runtime.speculation import choose
from aengine.runtime.speculation.base import Kept, ProposerChoice, ProposerParts
from aengine.runtime.speculation.runs import draft_counts
from aengine.runtime.startup import start_torch
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.results import read_outcome
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.written import WrittenVerdicts
from aengine.sampling.sampler import Kind, Sampler
from aengine.scheduling.planning.drafting import Drafting
from aengine.step_plan import StepPlan, StepResult
from tests.engine.speculation.replay import Book, Drafts, ReplayProposer
from tests.engine.speculation.test_heads import VOCAB, with_tokenizer
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.dflash_reference import DFlashSettings
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import write_head
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint
from tests.runtime.cuda.cpu_graph import CpuGraph, RecordableAttention, RecordableNgram, recordable
from tests.runtime.cuda.known_answers import KnownAnswers

KNOBS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "progress": False,
    "max_model_len": 60,
    "max_num_seqs": 3,
    "page_size": 4,
    "max_step_tokens": 24,
    "torch_threads": 1,
}
RNG = random.Random(5)
# They repeat themselves, as n-grams need. The longest is cut into chunks. Answers end at different lengths.
PROMPTS = [[RNG.randrange(1, 90) for _ in range(3 + 6 * i)] * 2 for i in range(4)]
LENGTHS = [8, 22, 17, 18]  # the last answer ends at the longest length
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "logprobs": 1},
]


class Replays:
    """The shapes that were replayed, and the drafts that they accepted."""

    def __init__(self) -> None:
        self.shapes: Counter[DecodeShape] = Counter()
        self.read: Counter[tuple[int, bool]] = Counter()  # (drafts of the shape, whether the plan is read)
        self.accepted = 0
        self.without_proposer = False  # whether engines without speculation replay graphs, too


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Let engines on the CPU replay graphs."""
    seen = Replays()

    class Graphs(DecodeGraphs):
        def replay(self, plan: StepPlan, shape: DecodeShape, kind: Kind) -> WrittenVerdicts:
            seen.shapes[shape] += 1
            seen.read[shape.drafts, plan.is_read] += 1
            written = super().replay(plan, shape, kind)
            seen.accepted += sum(written.read()[2]) - len(plan.decode) * bool(plan.drafts)
            return written

    class Executor(GraphedExecutor):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            decoder, kv, sampler, rows, states, proposer = parts[:6]
            if isinstance(proposer, ReplayProposer):
                monkeypatch.setattr(proposer, "propose", recordable(proposer.propose))
            if proposer is None and not seen.without_proposer:
                return
            shapes = [*map(DecodeShape, graph_sizes(rows.padding))]
            shapes += drafted_shapes(rows.padding, rows.most_drafts) if rows.most_drafts else []
            graphs = Graphs(decoder, kv, sampler, rows, proposer, torch_decodes, shapes, None, states)
            with torch.inference_mode():
                for shape in reversed(graphs.sizes):
                    graphs.record(shape)
                graphs.rehearse(graphs.sizes[0])  # unlike on a GPU, recordings have run, and advanced the turn
            self.decode_graphs = graphs

    class Runner(CpuRunner):
        def _run(self, plan: StepPlan) -> StepResult:
            for new in plan.new_rows:
                self._logprob_counts[new.row] = new.params.logprobs
            return read_outcome(self._executor.execute(plan), self._logprob_counts.get, plan)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CpuGraph)
    monkeypatch.setattr(start_torch, "StepExecutor", Executor)
    monkeypatch.setattr(start_torch, "CpuRunner", Runner)
    monkeypatch.setattr(start_torch, "TorchAttention", RecordableAttention)
    for name in ("draw_simple", "draw_filtered"):  # on a CPU they look for what they need not compute
        monkeypatch.setattr(Sampler, name, recordable(getattr(Sampler, name)))
    monkeypatch.setattr(choose, "_ngram_kernels", lambda device: RecordableNgram)
    monkeypatch.setattr(TorchDelta, "__call__", recordable(TorchDelta.__call__))
    return seen


async def answers(folder: Path, **knobs: Any) -> list[list[int]]:
    """Return the ids of all answers. All requests of a way run together."""
    found = []
    async with aengine.Engine(str(folder), **(KNOBS | knobs)) as engine:
        for way in WAYS:
            work = [
                engine.complete(prompt, max_tokens=length, ignore_eos=True, **way)
                for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
            ]
            found += [list(completion.token_ids) for completion in await asyncio.gather(*work)]
        engine.check_integrity()
    return found


@pytest.fixture(scope="module", params=["qwen3", "qwen3-5"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model without recurrent layers, and one with them."""
    folder = tmp_path_factory.mktemp(request.param)
    write_mtp_checkpoint(request.param, folder, vocab_size=VOCAB)
    return with_tokenizer(folder)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    """Return the ids of an engine without graphs and without speculation."""
    return asyncio.run(answers(target, speculation="off"))


def knob(speculation: str, folder: Path) -> str:
    if speculation == "draft":
        write_checkpoint("llama2", folder / "draft", vocab_size=VOCAB, num_hidden_layers=1)
        return f"draft={folder / 'draft'}"
    if speculation == "dflash":
        block = DFlashSettings(target_vocab=VOCAB, draft_vocab=VOCAB, mask=5, taps=(1, 2))
        return f"dflash={write_head(block, folder / 'head')}"
    if speculation not in ("eagle3", "masks"):
        return speculation
    mask = 9 if speculation == "masks" else None
    settings = HeadSettings(target_vocab=VOCAB, draft_vocab=1000, taps=(0, 1, 2), mask=mask)
    return f"eagle3={write_head(settings, folder / 'head')}"


@pytest.mark.anyio
async def test_ids_without_a_proposer_are_those_without_graphs(
    target: Path, expected: list[list[int]], replays: Replays
) -> None:
    replays.without_proposer = True
    assert await answers(target, speculation="off") == expected
    assert set(replays.shapes) == {DecodeShape(1), DecodeShape(2), DecodeShape(3)}


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("speculation", ["ngram", "mtp", "eagle3", "masks", "dflash", "draft"])
async def test_ids_are_those_without_graphs_and_without_drafts(
    speculation: str, target: Path, expected: list[list[int]], tmp_path: Path, replays: Replays
) -> None:
    assert await answers(target, speculation=knob(speculation, tmp_path), draft_tokens=3) == expected
    assert {shape.rows for shape in replays.shapes} == {1, 2, 3}
    assert 3 in {shape.drafts for shape in replays.shapes}
    # The target and the layer share the noise of seeded draws, so some of its drafts are right.
    assert replays.accepted > (2 if speculation == "mtp" else -1)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("right", [1.0, 0.7])
async def test_any_number_of_drafts_is_kept(
    right: float, target: Path, expected: list[list[int]], replays: Replays
) -> None:
    book = Book()
    for prompt, answer in zip(PROMPTS * len(WAYS), expected, strict=True):
        book.write(prompt, [answer])
    drafts = Drafts(book, right, most=5, wrong=range(VOCAB))
    assert await answers(target, start=drafts.start()) == expected
    assert replays.accepted > 30


@pytest.mark.anyio
async def test_a_row_keeps_the_drafts_of_a_known_answer(target: Path, replays: Replays) -> None:
    knobs, prompt = KNOBS | {"max_num_seqs": 2}, PROMPTS[0]
    async with aengine.Engine(str(target), speculation="off", **knobs) as engine:
        expected = (await engine.complete(prompt, max_tokens=20, temperature=0, ignore_eos=True)).token_ids
    choice = ProposerChoice("known", "a test asks for it", 2, partial(KnownAnswers, [[*prompt, *expected]]))
    async with aengine.Engine(
        str(target), start=partial(start_torch.start_torch, speculation=choice), **knobs
    ) as engine:
        found = await engine.complete(prompt, max_tokens=20, temperature=0, ignore_eos=True)
    assert found.token_ids == expected
    assert replays.accepted > 8
    assert set(replays.shapes) == {DecodeShape(1, 2)}


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("target", ["qwen3-5"], indirect=True)
@pytest.mark.parametrize(("right", "drafting"), [(1.0, 1.0), (0.6, 1.0), (0.6, 0.2)])
async def test_snapshots_of_replayed_steps_are_the_states_of_their_tokens(
    right: float, drafting: float, target: Path, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer crosses a position at which states are kept. The next turn of the chat continues from there.

    drafting: the share of steps that make drafts.
    """
    knobs, ends = KNOBS | {"max_model_len": 240}, [47, 56, 63]
    chats = [[RNG.randrange(1, 90) for _ in range(length)] for length in ends]
    turns = [30, 70]  # tokens
    book, expected = Book(), [list(chat) for chat in chats]

    async def turn(engine: aengine.Engine, chats: list[list[int]], count: int) -> None:
        work = [engine.complete(chat, max_tokens=count, temperature=0, ignore_eos=True) for chat in chats]
        for chat, completion in zip(chats, await asyncio.gather(*work), strict=True):
            book.write(chat, [completion.token_ids])
            chat += [*completion.token_ids, 7, 8]

    async with aengine.Engine(str(target), speculation="off", prefix_cache=False, **knobs) as engine:
        for count in turns:
            await turn(engine, expected, count)
    start = Drafts(book, right, most=5, wrong=range(VOCAB)).start()
    draft_now_and_then(monkeypatch, round(5 * drafting), reads=True)
    async with aengine.Engine(str(target), start=start, **knobs) as engine:
        for count in turns:
            await turn(engine, chats, count)
        assert chats == expected
        assert engine.stats().hit_rate > 0.3
        engine.check_integrity()
    assert replays.accepted > 50 * drafting


def draft_now_and_then(monkeypatch: pytest.MonkeyPatch, some: int, reads: bool) -> None:
    """Let only the first `some` of five steps make drafts. reads: whether the proposer reads the other ones."""
    steps = itertools.count()

    def begin(drafting: Drafting, running: object, plan: StepPlan, room: int) -> None:
        drafts = next(steps) % 5 < some
        plan.is_read, plan.proposals = reads or drafts, drafting.most if drafts else 0

    monkeypatch.setattr(Drafting, "begin", begin)


class CountedAnswers(KnownAnswers):
    """Counts how often it proposes, also in replays."""

    def __init__(self, texts: Sequence[Sequence[int]], runs: torch.Tensor, parts: ProposerParts) -> None:
        super().__init__(texts, parts)
        self._runs = runs

    def propose(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs | None) -> None:
        self._runs.add_(1)
        super().propose(plan, kept, rows, inputs)


@pytest.mark.anyio
async def test_a_step_that_is_not_read_replays_no_proposer(
    target: Path, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five steps make drafts. A step without drafts that makes none replays no proposer."""
    knobs, prompt = KNOBS | {"max_num_seqs": 2}, PROMPTS[0]
    async with aengine.Engine(str(target), speculation="off", **knobs) as engine:
        expected = (await engine.complete(prompt, max_tokens=30, temperature=0, ignore_eos=True)).token_ids
    runs = torch.zeros(1, dtype=torch.int64)
    draft_now_and_then(monkeypatch, 2, reads=False)
    choice = ProposerChoice("known", "a test asks for it", 2, partial(CountedAnswers, [[*prompt, *expected]], runs))
    async with aengine.Engine(
        str(target), start=partial(start_torch.start_torch, speculation=choice), **knobs
    ) as engine:
        runs.zero_()
        found = await engine.complete(prompt, max_tokens=30, temperature=0, ignore_eos=True)
    assert found.token_ids == expected
    read = replays.read
    assert read[0, False] > 1  # such steps are launched
    assert read[2, True] > 1
    assert read[2, False] > 1
    prompts = 1
    assert int(runs) == prompts + read.total() - read[0, False]


def test_fewer_drafts_than_the_most_are_captured_at_doubling_numbers() -> None:
    assert draft_counts(1) == [1]
    assert draft_counts(3) == [1, 2, 3]
    assert draft_counts(5) == [1, 2, 4, 5]
    assert draft_counts(20) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize("max_rows", [1, 3, 64, 300])
@pytest.mark.parametrize("most", [1, 4, 20])
def test_every_small_step_with_drafts_fits_a_captured_one(most: int, max_rows: int) -> None:
    shapes = drafted_shapes(max_rows, most)
    assert len(shapes) <= 40
    for rows in range(1, min(max_rows, DRAFTED_ROWS[-1], MOST_PLACES // 2 // (1 + most)) + 1):
        for drafts in range(1, most + 1):
            fitting = [shape for shape in shapes if shape.rows >= rows and shape.drafts >= drafts]
            assert min(shape.places for shape in fitting) <= 4 * rows * (1 + drafts)
