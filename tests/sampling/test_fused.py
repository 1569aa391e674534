"""The kernels that draw on CUDA against the sampler of a CPU: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from aengine.sampling import Sampler
from aengine.types import SamplingParams
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
    assert drawn.logprobs is not None
    assert reference.logprobs is not None
    assert torch.equal(drawn.logprobs.sampled, reference.logprobs.sampled)


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
