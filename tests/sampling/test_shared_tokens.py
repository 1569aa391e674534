"""Ranks that each have the logits of some tokens draw the same as one rank with all logits."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Draws, Sampler
from tests.sampling.build import CPU, new_row

VOCAB = 601
TEMPERATURES = (0.0, 0.3, 1.0, 2.0, 1e-45)
ROWS = len(TEMPERATURES)


def sampler(kernels: bool) -> Sampler:
    made = Sampler(ROWS, VOCAB, CPU)
    made.set_rows([new_row(row, SamplingParams(temperature=one), seed=7) for row, one in enumerate(TEMPERATURES)])
    if kernels:
        from aengine.sampling.fused import FusedDraw

        made._fused = FusedDraw(ROWS, CPU)
    return made


INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels want a GPU")


@pytest.fixture(params=[False, pytest.param(True, marks=[INTERPRETED, pytest.mark.gpu], id="tiny-kernels")])
def one(request: pytest.FixtureRequest) -> Sampler:
    return sampler(request.param)


def shared(one: Sampler, logits: Tensor, ranks: int) -> Draws:
    """Draw with all ranks. Columns after the last token must not be read."""
    each = -(-VOCAB // ranks)
    wide = torch.nn.functional.pad(logits, (0, ranks * each - VOCAB), value=torch.nan)
    rows, positions = torch.arange(ROWS), torch.arange(3, 3 + ROWS)
    found = [
        one.candidates(wide[:, first : first + each].contiguous(), rows, positions, first)
        for first in range(0, ranks * each, each)
    ]
    return one.choose(torch.cat(found, dim=1))


def alone(logits: Tensor) -> Draws:
    return sampler(kernels=False).draw_simple(logits, torch.arange(ROWS), torch.arange(3, 3 + ROWS))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("equals", [False, True])
def test_the_ids_equal_those_of_one_rank(one: Sampler, ranks: int, equals: bool) -> None:
    torch.manual_seed(ranks)
    logits = torch.randn(ROWS, VOCAB) * 3
    if equals:
        logits = logits.round()
    drawn, expected = shared(one, logits, ranks), alone(logits)
    assert drawn.token_ids.dtype == expected.token_ids.dtype
    assert drawn.token_ids.equal(expected.token_ids)
    assert drawn.finite.all()


@pytest.mark.parametrize("column", [0, VOCAB - 1])
def test_logits_that_are_not_finite_on_one_rank_fail_the_row(one: Sampler, column: int) -> None:
    logits = torch.zeros(ROWS, VOCAB)
    logits[0, column] = torch.nan
    logits[1, column] = torch.inf
    logits[2] = -torch.inf
    logits[3, column] = -torch.inf
    drawn = shared(one, logits, 4)
    assert drawn.finite.tolist() == alone(logits).finite.tolist() == [False, False, False, True, True]
    assert ((drawn.token_ids >= 0) & (drawn.token_ids < VOCAB)).all()


def test_no_word_of_a_candidate_is_the_empty_word_of_ranks(one: Sampler) -> None:
    logits = torch.full((ROWS, VOCAB), torch.nan)
    found = one.candidates(logits, torch.arange(ROWS), torch.arange(ROWS), 0)
    assert found.dtype == torch.float32
    assert (found.view(torch.int32) != -1).all()
