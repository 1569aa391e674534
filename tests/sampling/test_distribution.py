"""Draws follow the distribution. Seeds are fixed, so these tests never flicker."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Sampler
from tests.sampling.build import CPU, draw, draw_many, new_row

LOGITS = [0.5, -1.0, 2.0, 0.0, 1.0, -3.0, 1.5, 0.7]
COUNT = 40_000
CHI_SQUARE_7 = 24.3  # exceeded once in 1000 by 7 degrees of freedom
CHI_SQUARE_63 = 103.5  # likewise by 63


def probabilities(temperature: float) -> np.ndarray:
    weights = np.exp(np.array(LOGITS) / temperature)
    return weights / weights.sum()


def chi_square(ids: list[int], expected: np.ndarray) -> float:
    counts = np.bincount(ids, minlength=len(expected))
    return float(((counts - len(ids) * expected) ** 2 / (len(ids) * expected)).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, -7])
def test_one_seed_over_many_positions(seed: int, temperature: float) -> None:
    ids = draw_many(LOGITS, COUNT, seed=seed, temperature=temperature)
    assert chi_square(ids, probabilities(temperature)) < CHI_SQUARE_7


def test_many_seeds_at_one_position() -> None:
    rows = 20_000
    sampler = Sampler(rows, 8, CPU)
    sampler.set_rows([new_row(row, SamplingParams(), seed=row) for row in range(rows)])
    ids = draw(sampler, torch.tensor([LOGITS]).repeat(rows, 1), list(range(rows)), [7] * rows).token_ids.tolist()
    assert chi_square(ids, probabilities(1.0)) < CHI_SQUARE_7


def test_consecutive_positions_are_independent() -> None:
    p = probabilities(1.0)
    ids = np.array(draw_many(LOGITS, 2 * COUNT, seed=3))
    pairs = (ids[0::2] * 8 + ids[1::2]).tolist()
    assert chi_square(pairs, np.outer(p, p).ravel()) < CHI_SQUARE_63


def test_a_filtered_draw_follows_the_renormalized_distribution() -> None:
    p = probabilities(1.0)
    kept = np.argsort(p)[::-1][:5]
    expected = np.zeros(8)
    expected[kept] = p[kept] / p[kept].sum()
    ids = draw_many(LOGITS, COUNT, seed=11, top_k=5)
    assert set(ids) == set(kept.tolist())
    counts = np.bincount(ids, minlength=8)[kept]
    assert float(((counts - COUNT * expected[kept]) ** 2 / (COUNT * expected[kept])).sum()) < 18.5  # 4 degrees


@pytest.mark.slow
def test_a_large_flat_vocabulary_is_covered_evenly() -> None:
    vocab = 4096
    ids = np.concatenate([draw_many([0.0] * vocab, 2000, start=1 + 2000 * i, seed=5) for i in range(10)])
    buckets = np.bincount(ids // 64, minlength=64)
    expected = len(ids) / 64
    assert float(((buckets - expected) ** 2 / expected).sum()) < CHI_SQUARE_63
