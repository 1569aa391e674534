from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear.int4.packed_codes import pack_codes
from aengine.kernels.linear.weights import Int4Weight, Mxfp4Weight


def codes(n: int, k: int) -> torch.Tensor:
    return torch.randint(0, 16, (n, k), dtype=torch.uint8)


def test_a_word_holds_one_column_of_each_quarter_of_a_block() -> None:
    given = codes(3, 256)
    packed = pack_codes(Int4Weight(given, torch.ones(3, 2)))
    assert (packed.rows, packed.blocks, packed.columns) == (3, 2, 256)
    for column in (0, 31, 32, 127, 128, 200):
        block, quarter, word = column // 128, column % 128 // 32, column % 32
        found = packed.words[:, block * 32 + word].int() >> (4 * quarter) & 15
        assert torch.equal(found, given[:, column].int())


def test_scales_of_16_bits_stay_exact_beside_their_zeros() -> None:
    scale = torch.randn(5, 4).half()
    zero = torch.randint(0, 16, (5, 4), dtype=torch.uint8)
    packed = pack_codes(Int4Weight(codes(5, 256), scale, zero))
    assert packed.group == 64
    assert torch.equal((packed.scales & ~255).view(torch.float32).t(), scale.float())
    assert torch.equal((packed.scales & 255).t(), zero.int())
    assert torch.equal(pack_codes(Int4Weight(codes(5, 256), scale)).scales & 255, torch.full((4, 5), 8))


def test_a_last_block_is_filled_up_and_a_row_with_one_scale_is_one_group() -> None:
    packed = pack_codes(Int4Weight(codes(2, 320), torch.ones(2, 1)))
    assert (packed.words.shape, packed.scales.shape, packed.group) == ((2, 96), (1, 2), 384)
    packed = pack_codes(Int4Weight(codes(2, 320), torch.ones(2, 10)))
    assert (packed.scales.shape, packed.group) == ((12, 2), 32)


def test_exponents_of_a_block_are_one_word() -> None:
    scale = torch.randint(100, 140, (2, 5), dtype=torch.uint8)
    packed = pack_codes(Mxfp4Weight(codes(2, 160), scale))
    assert packed.mxfp4
    assert packed.scales.shape == (2, 2)
    for quarter in range(5):
        word = packed.scales[quarter // 4] >> (8 * (quarter % 4)) & 255
        assert torch.equal(word, scale[:, quarter].int())


def test_an_order_that_changes_nothing_is_forgotten() -> None:
    order = torch.randperm(128).roll(1)
    assert pack_codes(Int4Weight(codes(2, 128), torch.ones(2, 1), order=torch.arange(128))).order is None
    assert pack_codes(Int4Weight(codes(2, 128), torch.ones(2, 1), order=order)).order is order


def test_groups_without_a_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16 columns have no kernel: 32, 64"):
        pack_codes(Int4Weight(codes(2, 128), torch.ones(2, 8)))
