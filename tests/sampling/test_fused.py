"""The draw kernels against the CPU's sampler, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Draws, Sampler
from tests.sampling.build import CPU, draw, new_row

fused = pytest.importorskip("aengine.sampling.fused")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="test_on_gpu.py asks for the same on a GPU"),
]

VOCAB = 600
KINDS = [
    SamplingParams(temperature=0, top_k=4),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=1, min_p=0.2),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.8, temperature=1.4),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=5, top_p=0.7, min_p=0.1, temperature=0.6),
    SamplingParams(temperature=1e-45, top_p=1e-60),
    SamplingParams(top_k=20, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={3: 2.0}, logprobs=2),
]
ROWS = len(KINDS)


def sampler() -> Sampler:
    made = Sampler(ROWS, VOCAB, CPU)
    made.set_rows([new_row(row, params, seed=row, output=(5, 6)) for row, params in enumerate(KINDS)])
    return made


def with_kernels() -> Sampler:
    made = sampler()
    made._fused = fused.FusedDraw(ROWS, CPU)
    return made


def test_every_kind_of_row_draws_the_same_tiny() -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB) * 3
    rows = list(range(ROWS - 1, -1, -1))
    reference = draw(sampler(), logits, rows, [3] * ROWS)
    drawn = draw(with_kernels(), logits, rows, [3] * ROWS)
    assert torch.equal(drawn.token_ids, reference.token_ids)
    assert_same_logprobs(drawn, reference, logits)


BATCHES = {
    "penalties": [SamplingParams(temperature=0, repetition_penalty=1.4), SamplingParams(frequency_penalty=0.4)],
    "logprobs": [SamplingParams(temperature=0, logprobs=0), SamplingParams(logprobs=20, top_k=9)],
    "some": [
        SamplingParams(temperature=0),
        SamplingParams(presence_penalty=1.5, logprobs=3),
        SamplingParams(logprobs=5),
        SamplingParams(repetition_penalty=0.8, top_p=0.9),
    ],
    "everything": [
        SamplingParams(
            temperature=0.9,
            top_k=30,
            top_p=0.95,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.1,
            logit_bias={5: 3.0, 9: -100.0},
            min_tokens=4,
            allowed_token_ids=tuple(range(2, VOCAB, 3)),
            logprobs=20,
        )
    ],
}


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        ("penalties", torch.float32),
        ("logprobs", torch.float16),
        ("some", torch.float32),
        ("some", torch.float16),
        ("everything", torch.float16),
    ],
)
def test_penalties_and_logprobs_are_the_same_step_after_step_tiny(batch: str, dtype: torch.dtype) -> None:
    """Counts grow with each draw, and logprobs are of the raw logits in float32 or the model's dtype."""
    torch.manual_seed(2)
    params = BATCHES[batch]
    mine, theirs = with_kernels(), sampler()
    order = [3, 0, 5, 2]
    for one in (mine, theirs):
        one.set_rows(
            [
                new_row(row, params[row % len(params)], seed=row, prompt=[1, 2, 3], output=[4, 4], stop_ids=(8,))
                for row in order
            ]
        )
    for step in range(2):
        logits = (torch.randn(len(order), VOCAB) * 3).to(dtype)
        positions = [5 + step] * len(order)
        drawn, reference = draw(mine, logits, order, positions), draw(theirs, logits.float(), order, positions)
        assert torch.equal(drawn.token_ids, reference.token_ids)
        assert torch.equal(drawn.finite, reference.finite)
        assert_same_logprobs(drawn, reference, logits)


def test_a_row_without_any_unmasked_token_is_finite_tiny() -> None:
    made = with_kernels()
    made.set_rows([new_row(0, SamplingParams(temperature=0, min_tokens=9), stop_ids=tuple(range(VOCAB)))])
    logits = torch.randn(2, VOCAB)
    logits[1, 3] = torch.nan
    drawn = draw(made, logits, [0, 0], [1, 1])
    assert drawn.finite.tolist() == [True, False]


def assert_same_logprobs(drawn: Draws, reference: Draws, logits: torch.Tensor) -> None:
    assert (drawn.logprobs is None) == (reference.logprobs is None)
    if drawn.logprobs is not None and reference.logprobs is not None:
        torch.testing.assert_close(drawn.logprobs.sampled, reference.logprobs.sampled)
        torch.testing.assert_close(drawn.logprobs.top, reference.logprobs.top)
        # Equal tokens may come in any order.
        mine, theirs = (logits.gather(1, one.top_ids) for one in (drawn.logprobs, reference.logprobs))
        assert torch.equal(mine, theirs)


def test_the_fixed_shape_ways_draw_the_same_tiny() -> None:
    torch.manual_seed(1)
    mine, theirs = with_kernels(), sampler()
    filtered, simple = torch.arange(8), torch.tensor([0, 1, 2])
    logits = torch.randn(8, VOCAB).round()
    logits[6, 5] = torch.inf
    for way, rows in (("draw_filtered", filtered), ("draw_simple", simple)):
        drawn, reference = (
            getattr(one, way)(logits[: len(rows)], rows, torch.full((len(rows),), 4)) for one in (mine, theirs)
        )
        healthy = reference.finite
        assert torch.equal(drawn.finite, healthy)
        assert torch.equal(drawn.token_ids[healthy], reference.token_ids[healthy])
