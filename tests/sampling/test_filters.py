"""The filters and the repetition penalty against transformers' own processors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling.draw import Noise, draw_filtered, draw_greedy, draw_plain, lowest_kept
from aengine.sampling.noise import row_keys, token_codes
from aengine.sampling.parameters import RowParameters
from aengine.sampling.penalties import TokenCounts, penalize
from tests.sampling.build import CPU, new_row


def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[value]], dtype=dtype)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 300),
    st.floats(0.1, 2),
    st.one_of(st.just(0), st.integers(1, 300)),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.one_of(st.just(0.0), st.floats(0.001, 1)),
)
def test_transformers_keeps_the_same_tokens(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=3, size=(1, vocab_size)).astype(np.float32))
    ids = torch.zeros((1, 1), dtype=torch.int64)
    expected = TemperatureLogitsWarper(float(temperature))(ids, logits.double())
    if 0 < top_k < vocab_size:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    shares = expected.softmax(-1).sort(descending=True).values.cumsum(-1)
    assume(top_p == 1 or float((shares - top_p).abs().min()) > 1e-5)  # too close for float32 to tell
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    if min_p > 0:
        ratios = expected.softmax(-1) / expected.softmax(-1).max()
        assume(not bool(((ratios / min_p - 1).abs() < 1e-4)[ratios < 1].any()))
        expected = MinPLogitsWarper(min_p)(ids, expected)
    k = top_k if 0 < top_k < vocab_size else vocab_size
    for width in {k, vocab_size}:
        floor = lowest_kept(
            logits,
            column(temperature),
            column(k, torch.int32),
            column(top_p if top_p < 1 else 2.0),
            column(math.log(min_p) if min_p > 0 else -math.inf),
            width,
        )
        assert torch.equal(logits >= floor, expected.isfinite())


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 2.5])
def test_the_repetition_penalty_is_transformers(penalty: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 40)
    rows = [
        new_row(row, SamplingParams(repetition_penalty=penalty), prompt=[row, 5, 5], output=[7, row + 20, 39])
        for row in range(3)
    ]
    parameters = RowParameters(3, 40, CPU)
    counts = TokenCounts(3, 40, CPU)
    parameters.set_rows(rows)
    counts.set_rows(rows)
    everyone = torch.arange(3)
    mine = penalize(logits, counts.pick(everyone), parameters.pick(everyone))
    ids = torch.tensor([list(row.tokens) for row in rows])
    torch.testing.assert_close(mine, RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone()), rtol=0, atol=0)


def test_the_three_ways_to_draw_agree_where_they_overlap() -> None:
    """Without filters a filtered draw equals a plain one, and at temperature 0 both are the argmax."""
    torch.manual_seed(1)
    rows, vocab = 64, 200
    logits = torch.randn(rows, vocab)
    seeds = torch.arange(rows, dtype=torch.int32)[:, None]
    noise = Noise(token_codes(vocab, CPU), *row_keys(seeds, seeds * 0, seeds + 9))
    off = column(vocab, torch.int32).expand(rows, 1), column(2.0).expand(rows, 1), column(-math.inf).expand(rows, 1)
    for t in (0.0, 0.7):
        temperature = column(t).expand(rows, 1)
        plain = draw_plain(logits, noise, temperature, None)
        assert torch.equal(plain, draw_plain(logits, noise, temperature, off[2]))
        assert torch.equal(plain, draw_filtered(logits, noise, temperature, *off, vocab))
        assert torch.equal(plain, draw_greedy(logits)) == (t == 0)
