"""Speculation on a GPU: ids are those without it, and steps of decodes only replay graphs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # comes with the runner's kernels

import aengine
from aengine.runtime.cuda.decode_graphs import DecodeGraphs
from aengine.runtime.cuda.decode_shapes import DecodeShape
from aengine.runtime.speculation.base import ProposerChoice
from aengine.runtime.startup import start_cuda
from aengine.step_plan import StepPlan
from tests.engine.speculation.test_heads import with_tokenizer
from tests.model.drafting.head_reference import write_head
from tests.runtime.cuda.known_answers import KnownAnswers
from tests.runtime.cuda.no_gpu import LATENTS, checkpoint
from tests.runtime.cuda.test_drafted_variants import BLOCK, HEAD, MTP, RECURRENT

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

KNOBS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "load_format": "dummy",
    "kv_cache_gib": 2.0,
    "max_num_seqs": 20,
    "progress": False,
}
RNG = random.Random(7)
PROMPTS = [[RNG.randrange(10, 1000) for _ in range(RNG.randint(3, 200))] * 2 for _ in range(24)]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "logprobs": 1},
]
Answers = list[list[int]]


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


async def answers(engine: aengine.Engine) -> Answers:
    """Return the ids of all answers. All requests of a way run together, and some alone."""
    found = []
    for way in WAYS:
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:4]):
            requests = [
                engine.complete(prompt, max_tokens=10 + 3 * i, ignore_eos=True, **way)
                for i, prompt in enumerate(prompts)
            ]
            found += [list(completion.token_ids) for completion in await asyncio.gather(*requests)]
    engine.check_integrity()
    return found


async def answers_with(folder: Path, **knobs: Any) -> Answers:
    async with aengine.Engine(str(folder), **(KNOBS | knobs)) as engine:
        return await answers(engine)


TARGETS = {"heads": MTP, "latents": LATENTS, "recurrent": RECURRENT}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return with_tokenizer(checkpoint(tmp_path, 8, TARGETS[request.param]))


@pytest.mark.parametrize(
    ("speculation", "target", "knobs"),
    [
        pytest.param("ngram", "heads", {"cuda_graphs": False}, id="ngram"),
        pytest.param("mtp", "heads", {"lookahead": False}, id="mtp"),
        pytest.param("eagle3", "heads", {"draft_tokens": 1}, id="eagle3"),
        pytest.param("dflash", "heads", {"cuda_graphs": False, "draft_tokens": 3}, id="dflash"),
        pytest.param("dflash", "latents", {"lookahead": False}, id="dflash-latents"),
        pytest.param("masks", "heads", {"cuda_graphs": False, "draft_tokens": 3}, id="masks"),
        pytest.param("draft", "heads", {"max_num_seqs": 3}, id="draft"),
        pytest.param("ngram", "recurrent", {"max_num_seqs": 3}, id="ngram-recurrent"),
        pytest.param("mtp", "recurrent", {"cuda_graphs": False}, id="mtp-recurrent"),
        pytest.param("eagle3", "recurrent", {"lookahead": False}, id="eagle3-recurrent"),
    ],
    indirect=["target"],
)
async def test_ids_are_those_without_graphs_and_without_speculation(
    speculation: str, target: Path, knobs: dict[str, Any], tmp_path: Path
) -> None:
    """A start takes seconds, so each case has one other knob."""
    if speculation == "masks":
        speculation = f"eagle3={write_head(replace(HEAD, mask=5), tmp_path / 'head', {})}"
    if speculation == "eagle3":
        speculation = f"eagle3={write_head(HEAD, tmp_path / 'head', {})}"
    if speculation == "dflash":
        speculation = f"dflash={write_head(BLOCK, tmp_path / 'head', {})}"
    if speculation == "draft":
        (tmp_path / "draft").mkdir()
        speculation = f"draft={checkpoint(tmp_path / 'draft', 8, {'num_hidden_layers': 1, 'head_dim': 64})}"
    expected = await answers_with(target, speculation="off")
    for more in ({}, knobs):
        assert await answers_with(target, speculation=speculation, **more) == expected, more


async def test_drafts_that_are_kept_change_no_id_and_nothing_is_compiled_or_captured(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While decodes are launched, waiting for the device is an error. Prompts repeat, so states are read and saved."""
    import triton

    expected = await answers_with(target, speculation="off")
    groups = [PROMPTS, PROMPTS[:1], PROMPTS[1:4]]
    texts = [prompt + answer for prompt, answer in zip([p for g in groups for p in g] * len(WAYS), expected)]
    compiled: list[object] = []
    shapes: list[DecodeShape] = []
    begin, replay = torch.cuda.CUDAGraph.capture_begin, DecodeGraphs.replay

    def strict(graphs: DecodeGraphs, plan: StepPlan, shape: DecodeShape, kind: Any) -> Any:
        shapes.append(shape)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return replay(graphs, plan, shape, kind)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    # One way at a time, because the same prompt has another answer in each.
    for way, first in zip(WAYS, range(0, len(texts), len(texts) // len(WAYS))):
        known = texts[first : first + len(PROMPTS)]
        choice = ProposerChoice("known", "a test asks for it", 4, partial(KnownAnswers, known))
        monkeypatch.setattr(start_cuda, "choose_proposer", lambda config, model, *_, one=choice: (model, one))
        async with aengine.Engine(str(target), **KNOBS) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]))
                patch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda *a, **k: compiled.append("a graph"))
                patch.setattr(DecodeGraphs, "replay", strict)
                requests = [
                    engine.complete(prompt, max_tokens=10 + 3 * i, ignore_eos=True, **way)
                    for i, prompt in enumerate(PROMPTS)
                ]
                found = [list(completion.token_ids) for completion in await asyncio.gather(*requests)]
            assert found == expected[first : first + len(PROMPTS)]
            stats = engine.stats()
            assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 100
    assert compiled == []
    assert begin is torch.cuda.CUDAGraph.capture_begin
    assert {shape.drafts for shape in shapes} == {4}
    assert len({shape.rows for shape in shapes}) > 3
