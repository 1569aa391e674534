"""Whether what a prefill chunk writes into its pages is finite, in whatever layer it stopped to be, drawn from or not.

The scheduler puts nothing else into the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aengine
from aengine.attention.torch_backend import TorchAttention
from aengine.errors import NonFiniteLogitsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.blocks.step import Step
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.hub import resolve_model
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.runner import StepExecutor
from aengine.runtime.step.results import read_outcome
from aengine.step_plan import NewRow, PrefillChunk, StepPlan, StepResult
from tests.lessons.rig import Rig
from tests.model.loading_one import load_model
from tests.runtime.cuda.test_prefill_graphs import FixedShapeAttention, FixedShapeExecutor
from tests.runtime.step.test_cells import plan

ROWS = 4
PAGES = 3  # of 16 tokens, for each row


@pytest.fixture(params=["any shape", "fixed shapes"])
def executor(request: pytest.FixtureRequest) -> StepExecutor:
    """A model of its own, for a test to break."""
    folder = resolve_model(None, None)
    attention = TorchAttention() if request.param == "any shape" else FixedShapeAttention()
    decoder = load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=attention,
    )
    usual = Rig(decoder, max_rows=ROWS, max_step_tokens=96).executor
    return usual if request.param == "any shape" else FixedShapeExecutor(usual)


def entering(*rows: int) -> list[NewRow]:
    return [
        NewRow(
            row=row,
            params=SamplingParams(temperature=0),
            seed=0,
            stop_ids=(),
            prompt_len=32,
            tokens=[300 + row] * 32,
            length=0,
            pages=list(range(1 + row * PAGES, 1 + (row + 1) * PAGES)),
        )
        for row in rows
    ]


def chunk(row: int, start: int, count: int, *, samples: bool = False) -> PrefillChunk:
    return PrefillChunk(row=row, start=start, token_ids=[300 + row] * count, samples=samples)


def run(executor: StepExecutor, step: StepPlan) -> StepResult:
    return read_outcome(executor.execute(step), lambda row: None, step)


def break_token(executor: StepExecutor, page: int, offset: int) -> None:
    """What all layers keep of it is no number."""
    for index in range(len(executor._decoder.config.paging)):
        for kept in executor.kv.layer(index):
            kept[page, offset] = float("nan")


def break_attention(decoder: Decoder, layer: int, token: int) -> None:
    """Put NaN into what a layer's attention returns for one of the step's tokens."""
    block: Any = decoder._layers[layer][0]
    usual = block._attend

    def broken(*arguments: Any) -> Tensor:
        attended = usual(*arguments)
        attended[token, 0, 0] = float("nan")
        return attended

    block._attend = broken


def break_mlp(decoder: Decoder, layer: int, token: int) -> None:
    usual = decoder._layers[layer][1]

    def broken(x: Tensor, step: Step) -> Tensor:
        x = usual(x, step)
        x[token, 0] = float("inf")
        return x

    decoder._layers[layer][1] = broken


def test_all_chunks_are_finite_in_a_model_that_is_well(executor: StepExecutor) -> None:
    step = plan(new_rows=entering(0, 1), prefill=[chunk(0, 0, 20), chunk(1, 0, 32, samples=True)])
    assert list(run(executor, step).finite_chunks) == []


@pytest.mark.parametrize("broken", [pytest.param(break_attention, marks=pytest.mark.slow), break_mlp])
@pytest.mark.parametrize("layer", [*(pytest.param(layer, marks=pytest.mark.slow) for layer in (0, 1)), -2])
@pytest.mark.parametrize(
    ("token", "finite"), [(1, [False, True, True]), (20, [False, True, True]), (21, [True, False, True])]
)
def test_only_the_chunk_whose_token_is_not_finite_in_some_layer_is_not(
    executor: StepExecutor, broken: Callable[[Decoder, int, int], None], layer: int, token: int, finite: list[bool]
) -> None:
    """A decode comes first, then chunks of 20, 10 and 32 tokens. Only the last chunk draws."""
    run(executor, plan(new_rows=entering(3), prefill=[chunk(3, 0, 32, samples=True)]))
    broken(executor._decoder, layer, token)
    step = plan(
        new_rows=entering(0, 1, 2),
        decode=[3],
        prefill=[chunk(0, 0, 20), chunk(1, 0, 10), chunk(2, 0, 32, samples=True)],
    )
    result = run(executor, step)
    assert list(result.finite_chunks) == finite
    assert result.finite == [True, True]


def test_the_last_layers_attention_too(executor: StepExecutor) -> None:
    break_attention(executor._decoder, -1, 3)
    step = plan(new_rows=entering(0, 1), prefill=[chunk(0, 0, 20), chunk(1, 0, 10)])
    assert list(run(executor, step).finite_chunks) == [False, True]


def test_a_chunk_that_reads_pages_which_are_not_finite_is_not(executor: StepExecutor) -> None:
    run(executor, plan(new_rows=entering(0, 1), prefill=[chunk(0, 0, 20), chunk(1, 0, 20)]))
    break_token(executor, 1, 5)  # of row 0
    result = run(executor, plan(prefill=[chunk(0, 20, 10), chunk(1, 20, 10)]))
    assert list(result.finite_chunks) == [False, True]


def test_a_step_that_only_decodes_says_so_by_its_draws(executor: StepExecutor) -> None:
    run(executor, plan(new_rows=entering(0, 1), prefill=[chunk(0, 0, 32, samples=True), chunk(1, 0, 32, samples=True)]))
    break_token(executor, 1, 5)
    step = plan(decode=[0, 1], new_pages=[])
    outcome = executor.execute(step)
    assert outcome.sums is None
    assert read_outcome(outcome, lambda row: None, step).finite == [False, True]


# ---- through the engine -----------------------------------------------------------------------------------

POISON = 411  # a token id whose embedding breaks


@pytest.fixture
def breakable(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Break the embedding of one token in every model that computes, and heal it."""
    sick = False
    usual = Decoder.forward

    def forward(self: Decoder, *arguments: Any, **named: Any) -> Tensor:
        self.embed._table[POISON] = float("nan") if sick else 0.01
        return usual(self, *arguments, **named)

    def set_sick(value: bool) -> None:
        nonlocal sick
        sick = value

    monkeypatch.setattr(Decoder, "forward", forward)
    return set_sick


@pytest.mark.anyio
async def test_a_prompt_with_a_fault_in_its_first_chunk_works_again_once_the_fault_is_gone(
    breakable: Callable[[bool], None],
) -> None:
    shared = list(range(300, 380))
    prompt = [*shared[:40], POISON, *shared[40:]]
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    async with aengine.Engine(
        device="cpu", kv_cache_gib=0.05, max_num_seqs=4, max_step_tokens=32, torch_threads=1
    ) as engine:
        expected = await engine.complete([*prompt, 5], **greedy)
        engine.flush_cache()
        before = await engine.complete([*shared, 6], **greedy)
        breakable(True)
        with pytest.raises(NonFiniteLogitsError):
            await engine.complete([*prompt, 5], **greedy)
        assert (
            await engine.complete([*shared, 6], **greedy)
        ).token_ids == before.token_ids  # other requests are unaffected
        breakable(False)
        after = await engine.complete([*prompt, 5], **greedy)
        assert after.token_ids == expected.token_ids
        assert after.usage.cached_tokens <= 40  # what came before the fault, at most
        engine.check_integrity()
