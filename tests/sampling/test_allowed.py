"""allowed_token_ids: no other token can be drawn, with any other parameters of the row and its batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.errors import InvalidRequestError
from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured
from aengine.sampling import Kind, Sampler
from tests.sampling.build import CPU, draw, draw_many, draw_one, new_row

VOCAB = 70


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1), st.integers(0, 2**32 - 1))
def test_the_likeliest_of_the_allowed_ones(allowed: set[int], seed: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    best = max(allowed, key=lambda token: float(logits[token]))
    assert draw_one(logits.tolist(), temperature=0, allowed_token_ids=tuple(allowed)) == best


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_draws_come_from_the_allowed_ones_in_their_proportions(filters: dict[str, float]) -> None:
    logits = [0.0] * VOCAB
    logits[9] = 30.0  # the likeliest by far, and not allowed
    drawn = draw_many(logits, 400, seed=3, allowed_token_ids=(4, 69), **filters)
    assert set(drawn) == {4, 69}
    assert 140 < drawn.count(4) < 260


def test_bias_and_penalties_apply_among_the_allowed_ones() -> None:
    logits = [0.0] * VOCAB
    assert draw_one(logits, temperature=0, allowed_token_ids=(3, 5), logit_bias={5: 1.0, 7: 100.0}) == 5
    assert draw_one(logits, temperature=0, allowed_token_ids=(3, 5), presence_penalty=2.0, output=[3]) == 5


def test_stop_ids_are_no_exception() -> None:
    """As in vLLM: a stop id that is not allowed never comes, and one that is allowed waits for min_tokens."""
    logits = [0.0] * VOCAB
    logits[2] = 9.0
    assert draw_one(logits, temperature=0, allowed_token_ids=(3,), stop_ids=(2,)) == 3
    assert draw_one(logits, temperature=0, allowed_token_ids=(2, 3), stop_ids=(2,)) == 2
    assert draw_one(logits, temperature=0, allowed_token_ids=(2, 3), stop_ids=(2,), min_tokens=1) == 3


def test_the_only_allowed_token_is_drawn_even_if_other_masks_forbid_it() -> None:
    logits = [0.0] * VOCAB
    assert draw_one(logits, temperature=0, allowed_token_ids=(2,), stop_ids=(2,), min_tokens=9) == 2
    assert draw_one(logits, temperature=0, allowed_token_ids=(8,), banned=[(8,)]) == 8


def test_rows_in_one_batch_and_one_after_the_other() -> None:
    sampler = Sampler(3, VOCAB, CPU)
    logits = torch.zeros(3, VOCAB)
    logits[:, 60] = 9.0
    greedy = SamplingParams(temperature=0)
    only = SamplingParams(temperature=0, allowed_token_ids=(1,))
    sampler.set_rows([new_row(0, greedy), new_row(1, only), new_row(2, only)])
    assert sampler.kind([0, 1]) is Kind.ANY
    assert draw(sampler, logits, [0, 1, 2], [1, 1, 1]).token_ids.tolist() == [60, 1, 1]
    sampler.set_rows([new_row(1, greedy), new_row(2, SamplingParams(temperature=0, allowed_token_ids=(33, 34)))])
    assert draw(sampler, logits, [2, 1, 0], [1, 1, 1]).token_ids.tolist() == [33, 60, 60]


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    logits = torch.zeros(1, VOCAB)
    logits[0, 60] = 5.0
    sampler.set_rows([new_row(0, SamplingParams(temperature=0, allowed_token_ids=(1,), logprobs=1))])
    draws = draw(sampler, logits, [0], [1])
    raw = logits.log_softmax(-1)[0]
    assert draws.logprobs is not None
    assert draws.token_ids.tolist() == [1]
    assert draws.logprobs.sampled[0] == pytest.approx(float(raw[1]))
    assert draws.logprobs.top_ids.tolist() == [[60]]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"allowed_token_ids": ()}, "at least one"),
        ({"allowed_token_ids": (1, VOCAB)}, "holds 70"),
        ({"allowed_token_ids": (-1,)}, "holds -1"),
        ({"allowed_token_ids": (1.5,)}, "holds 1.5"),
        ({"allowed_token_ids": tuple([1] * (VOCAB + 1))}, "more than the vocabulary"),
        ({"allowed_token_ids": (1,), "structured": Structured(regex="a")}, "structured"),
    ],
)
def test_what_is_refused(params: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as error:
        SamplingParams(**params).validate(VOCAB)  # type: ignore[arg-type]
    assert error.value.param == "allowed_token_ids"
