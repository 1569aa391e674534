"""The noise of a draw has exactly the bits of its formula, and is uniform and never 0 or 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aengine.sampling.noise import gumbel, hash32, row_keys, signed32, split_seed, token_codes, uniforms
from tests.sampling import reference
from tests.sampling.build import CPU

SEEDS = [0, 1, -1, 42, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0x0123456789ABCDEF]


def hashes(seed: int, positions: list[int], vocab_size: int) -> torch.Tensor:
    low, high = (torch.full((len(positions), 1), half, dtype=torch.int32) for half in split_seed(seed))
    keys = row_keys(low, high, torch.tensor(positions, dtype=torch.int32)[:, None])
    return hash32(token_codes(vocab_size, CPU), *keys)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_hash_is_the_published_one(seed: int) -> None:
    positions = [0, 1, 77, 131_071]
    x = hashes(seed, positions, 200)
    expected = [[signed32(reference.hash32(seed, position, i)) for i in range(200)] for position in positions]
    assert x.tolist() == expected


def test_the_hash_never_changes() -> None:
    """A seed must give the same ids in every release and on every device."""
    assert [reference.hash32(42, 7, i) for i in (0, 1, 151_935)] == [1_170_069_514, 3_540_249_716, 3_984_843_319]


def test_ids_at_the_end_of_a_large_vocabulary_are_hashed_the_same_way() -> None:
    x = hashes(5, [3], 151_936)
    assert int(x[0, -1]) == signed32(reference.hash32(5, 3, 151_935))


def test_every_uniform_is_exact_and_strictly_between_0_and_1() -> None:
    """Check all 2**23 values."""
    mantissas = torch.arange(2**23, dtype=torch.int64)
    u = uniforms((mantissas << 9).to(torch.int32))
    assert u.dtype == torch.float32
    assert torch.equal(u.double(), (mantissas.double() + 0.5) / 2**23)
    assert u.min() > 0
    assert u.max() < 1
    assert (-(-u.log()).log()).isfinite().all()


def test_the_low_bits_of_the_hash_do_not_matter() -> None:
    assert uniforms(torch.tensor([0x1FF, 0])).tolist() == [2.0**-24, 2.0**-24]


def test_gumbel_noise_agrees_with_float64() -> None:
    low, high = (torch.tensor([[half]], dtype=torch.int32) for half in split_seed(9))
    noise = gumbel(token_codes(500, CPU), *row_keys(low, high, torch.tensor([[4]], dtype=torch.int32)))
    np.testing.assert_allclose(noise[0].numpy(), reference.gumbel(9, 4, 500), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vary", ["token", "position", "seed", "high half of the seed"])
def test_neighbours_get_independent_uniforms(vary: str) -> None:
    """Chi-square over 256 x 256 cells of consecutive pairs; the threshold is 5 standard deviations."""
    n = 1 << 20
    if vary == "token":
        u = hashes(7, [11], n + 1)[0]
    elif vary == "position":
        u = hashes(7, list(range(n + 1)), 4)[:, 3]
    else:
        counter = torch.arange(n + 1, dtype=torch.int32)[:, None]
        zero = torch.zeros_like(counter)
        low, high = (counter, zero) if vary == "seed" else (zero, counter)
        u = hash32(token_codes(4, CPU), *row_keys(low, high, zero + 5))[:, 3]
    cells = (u >> 24) & 0xFF
    counts = torch.bincount(cells[:-1] * 256 + cells[1:], minlength=65_536).double()
    expected = n / 65_536
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 65_535) < 5 * (2 * 65_535) ** 0.5


def test_no_two_rows_of_a_batch_have_equal_noise() -> None:
    """Seeds 0..255 at positions 0..255, like on a busy server."""
    seeds = torch.arange(256, dtype=torch.int32).repeat_interleave(256)[:, None]
    positions = torch.arange(256, dtype=torch.int32).repeat(256)[:, None]
    x = hash32(token_codes(3, CPU), *row_keys(seeds, torch.zeros_like(seeds), positions))
    assert len(torch.unique(x, dim=0)) == 65_536
