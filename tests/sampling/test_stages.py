"""The effect of each sampling parameter, and the order of the stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Sampler
from tests.sampling.build import CPU, draw, draw_many, draw_one, new_row

LOGITS = [1.0, 4.0, 3.0, 2.0]  # likeliest first: 1, 2, 3, 0


def support(logits: Sequence[float], count: int = 2000, **row: object) -> set[int]:
    """Return the ids that can be drawn: those that occur in many draws at a high temperature."""
    return set(draw_many(logits, count, **row))


# ---- temperature ------------------------------------------------------------------------------------------


def test_temperature_0_is_argmax_and_the_lowest_id_among_equals() -> None:
    assert draw_one(LOGITS, temperature=0) == 1
    assert draw_one([1.0, 5.0, 5.0], temperature=0) == 1


def test_temperature_0_ignores_filters() -> None:
    assert draw_one(LOGITS, temperature=0, top_k=3, top_p=0.5, min_p=0.5, seed=9) == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"min_p": 0.1}, {"top_p": 0.9}, {"top_k": 2}])
def test_a_tiny_temperature_is_argmax_without_overflow(temperature: float, filters: dict[str, float]) -> None:
    assert support([-300.0, 250.0, 249.0], temperature=temperature, **filters) == {1}


def test_a_higher_temperature_flattens() -> None:
    cold, hot = (Counter(draw_many([0.0, 2.0], 4000, temperature=t))[0] / 4000 for t in (0.5, 2.0))
    assert cold == pytest.approx(1 / (1 + math.exp(4)), abs=0.01)
    assert hot == pytest.approx(1 / (1 + math.exp(1)), abs=0.03)


# ---- top_k, top_p, min_p ----------------------------------------------------------------------------------


@pytest.mark.parametrize("one_left", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1e-60}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_argmax(one_left: dict[str, float]) -> None:
    assert support(LOGITS, temperature=2.0, **one_left) == {1}


def test_top_k_keeps_the_k_likeliest() -> None:
    assert support(LOGITS, temperature=2.0, top_k=2) == {1, 2}
    assert support(LOGITS, temperature=2.0, top_k=3) == {1, 2, 3}


@pytest.mark.parametrize("top_k", [0, -1, 4, 5, 10**12])
def test_top_k_of_nothing_or_everything_is_off(top_k: int) -> None:
    assert support(LOGITS, temperature=2.0, top_k=top_k) == {0, 1, 2, 3}


def test_top_k_keeps_the_equals_of_the_last_one() -> None:
    assert support([5.0, 4.0, 4.0, 1.0], temperature=2.0, top_k=2) == {0, 1, 2}


def test_top_k_1_of_equals_is_the_lowest_id() -> None:
    assert support([4.0, 5.0, 5.0], temperature=2.0, top_k=1) == {1}


def test_top_p_keeps_the_fewest_that_reach_the_share() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert support(logits, top_p=0.49) == {0}
    assert support(logits, top_p=0.51) == {0, 1}
    assert support(logits, top_p=0.79) == {0, 1}
    assert support(logits, top_p=0.81) == {0, 1, 2}
    assert support(logits, top_p=0.96) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert support(logits, min_p=0.61) == {0}
    assert support(logits, min_p=0.59) == {0, 1}
    assert support(logits, min_p=0.31) == {0, 1}
    assert support(logits, min_p=0.29) == {0, 1, 2}
    assert support(logits, min_p=0.09) == {0, 1, 2, 3}


def test_filtered_draws_keep_the_proportions_of_the_kept_tokens() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    counts = Counter(draw_many(logits, 8000, top_k=2))
    assert counts[0] / 8000 == pytest.approx(5 / 8, abs=0.02)


def test_rows_without_top_k_share_a_batch_with_rows_that_have_one() -> None:
    sampler = Sampler(2, 4, CPU)
    sampler.set_rows([new_row(0, SamplingParams(top_k=2)), new_row(1, SamplingParams(top_p=0.999), seed=1)])
    seen: list[set[int]] = [set(), set()]
    for position in range(1, 1000):
        for row, token_id in enumerate(
            draw(sampler, torch.zeros(2, 4) + torch.arange(4), [0, 1], [position] * 2).token_ids
        ):
            seen[row].add(int(token_id))
    assert seen == [{2, 3}, {0, 1, 2, 3}]


# ---- the order of the stages ------------------------------------------------------------------------------


def test_bias_comes_before_the_repetition_penalty() -> None:
    """Token 0: (2 + 2) / 2 = 2, below 2.5. In the other order it would be 2 / 2 + 2 = 3."""
    assert draw_one([2.0, 2.5], temperature=0, logit_bias={0: 2.0}, repetition_penalty=2.0, prompt=[0]) == 1


def test_bias_decides_the_sign_that_the_repetition_penalty_sees() -> None:
    """Token 0: 1 - 2 = -1, times 2 is -2, below -1.5. In the other order it would be 1 / 2 - 2 = -1.5 = no loss."""
    assert draw_one([1.0, -1.6], temperature=0, logit_bias={0: -2.0}, repetition_penalty=2.0, prompt=[0]) == 1


def test_repetition_comes_before_presence_and_frequency() -> None:
    """Token 0: 4 / 2 - 1 = 1, below 1.2. In the other order it would be (4 - 1) / 2 = 1.5."""
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert draw_one([4.0, 1.2], temperature=0, repetition_penalty=2.0, **{penalty: 1.0}, output=[0]) == 1


def test_masks_come_after_bias() -> None:
    assert draw_one([0.0, 1.0], temperature=0, logit_bias={0: 100.0}, min_tokens=1, stop_ids=(0,)) == 1


def test_penalties_come_before_temperature_and_filters() -> None:
    """Penalized, token 1 is no longer among the two likeliest."""
    assert support([3.0, 4.0, 3.0], temperature=2.0, top_k=2, presence_penalty=2.0, output=[1]) == {0, 2}


def test_temperature_comes_before_top_p() -> None:
    """At temperature 1 token 0 has 73 % and is enough for 70 %; at 2 it has 62 % and is not."""
    assert support([1.0, 0.0], temperature=1.0, top_p=0.7) == {0}
    assert support([1.0, 0.0], temperature=2.0, top_p=0.7) == {0, 1}


def test_temperature_comes_before_min_p() -> None:
    """Token 1 is exp(-1) = 37 % as likely as token 0 at temperature 1 and 61 % at 2."""
    assert support([1.0, 0.0], temperature=1.0, min_p=0.5) == {0}
    assert support([1.0, 0.0], temperature=2.0, min_p=0.5) == {0, 1}


def test_top_k_comes_before_top_p() -> None:
    """Of everything token 0 has 50 %, of the likeliest two 62.5 %: enough for 60 % only then."""
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert support(logits, top_p=0.6) == {0, 1}
    assert support(logits, top_p=0.6, top_k=2) == {0}


# ---- logit_bias -------------------------------------------------------------------------------------------


def test_bias_is_added_only_for_its_row() -> None:
    sampler = Sampler(3, 4, CPU)
    sampler.set_rows(
        [
            new_row(0, SamplingParams(temperature=0)),
            new_row(1, SamplingParams(temperature=0, logit_bias={0: 3.5})),
            new_row(2, SamplingParams(temperature=0, logit_bias={1: -100.0, 2: -100.0, 0: 0.5})),
        ]
    )
    batch = torch.tensor([LOGITS] * 3)
    assert draw(sampler, batch, [0, 1, 2], [1] * 3).token_ids.tolist() == [1, 0, 3]
    assert draw(sampler, batch[:2], [2, 0], [2] * 2).token_ids.tolist() == [3, 1]


def test_a_longer_bias_of_another_row_does_not_affect_a_row() -> None:
    sampler = Sampler(2, 4, CPU)
    sampler.set_rows([new_row(0, SamplingParams(temperature=0, logit_bias={3: 9.0}))])
    sampler.set_rows([new_row(1, SamplingParams(temperature=0, logit_bias={0: 1.0, 1: 1.0, 2: 8.0}))])
    assert draw(sampler, torch.tensor([LOGITS] * 2), [0, 1], [1, 1]).token_ids.tolist() == [3, 2]


def test_a_thousand_biases_fit() -> None:
    bias = dict.fromkeys(range(1024), -100.0)
    assert draw_one([1.0] * 1024 + [0.0], temperature=0, logit_bias=bias) == 1024


# ---- min_tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("position", "drawn"), [(3, 1), (4, 1), (5, 0), (6, 0)])
def test_stop_ids_are_masked_until_min_tokens_are_drawn(position: int, drawn: int) -> None:
    """A prompt of 3 and min_tokens=2: the tokens at positions 3 and 4 may not be stops."""
    row = {"temperature": 0, "min_tokens": 2, "stop_ids": (0, 2), "prompt": [1, 1, 1]}
    assert draw_one([9.0, 1.0, 8.0], position, **row) == drawn


def test_the_mask_moves_with_the_position_not_with_the_calls() -> None:
    sampler = Sampler(1, 2, CPU)
    sampler.set_rows([new_row(0, SamplingParams(temperature=0, min_tokens=2), stop_ids=(0,), prompt=[1] * 5)])
    assert [int(draw(sampler, torch.tensor([[1.0, 0.0]]), [0], [p]).token_ids) for p in (5, 6, 7)] == [1, 1, 0]


def test_min_tokens_without_stop_ids_masks_nothing() -> None:
    assert draw_one(LOGITS, temperature=0, min_tokens=5) == 1


def test_a_stop_id_beyond_the_vocabulary_is_ignored() -> None:
    """Checkpoints name EOS ids that their own output layer does not have."""
    sampler = Sampler(2, 4, CPU)
    rows = [new_row(row, SamplingParams(temperature=0, min_tokens=5), stop_ids=(5, 1, 4)) for row in range(2)]
    sampler.set_rows(rows)
    assert draw(sampler, torch.tensor([LOGITS] * 2), [0, 1], [1, 1]).token_ids.tolist() == [2, 2]


def test_min_tokens_beyond_any_context_is_accepted() -> None:
    assert draw_one(LOGITS, temperature=0, min_tokens=10**15, stop_ids=(1,)) == 2
