from __future__ import annotations

import itertools

import pytest
import torch

from aengine.kernels.linear.int4.packed_codes import pack_codes, spread
from aengine.kernels.linear.weights.e2m1 import E2M1, Mxfp4Weight, Nvfp4Weight
from aengine.kernels.linear.weights.integers import Int4Weight


def codes(n: int, k: int) -> torch.Tensor:
    return torch.randint(0, 16, (n, k), dtype=torch.uint8)


@pytest.mark.parametrize("thread", [0, 3, 4, 31])
def test_a_thread_finds_its_share_of_a_product_in_one_piece(thread: int) -> None:
    given = codes(27, 256)
    packed = pack_codes(Int4Weight(given, torch.ones(27, 2)))
    assert (packed.rows, packed.blocks, packed.columns) == (27, 2, 256)
    row, column = thread // 4, thread % 4 * 2
    for block, half, quarter in itertools.product(range(2), range(2), range(4)):
        mine = packed.words[0, block].view(2, 32, 8)[half, thread].int() >> (4 * quarter) & 15
        left = block * 128 + quarter * 32 + half * 16 + column
        places = [(row + down, left + right + i) for down in (0, 8) for right in (0, 8) for i in (0, 1)]
        assert mine.tolist() == [given[place] for place in places]


def test_rows_are_padded_to_whole_tiles() -> None:
    packed = pack_codes(Int4Weight(codes(17, 128), torch.ones(17, 1)))
    assert (packed.words.shape, packed.rows) == ((2, 1, 512), 17)
    assert not packed.words[1].view(2, 8, 4, 2, 4)[:, 1:].any()
    assert not packed.words[1].view(2, 8, 4, 2, 4)[:, :, :, 1].any()


def test_scales_of_16_bits_stay_exact_beside_their_zeros() -> None:
    scale = torch.randn(5, 4).half()
    zero = torch.randint(0, 16, (5, 4), dtype=torch.uint8)
    packed = pack_codes(Int4Weight(codes(5, 256), scale, zero))
    assert packed.group == 64
    assert torch.equal((packed.scales & ~255).view(torch.float32).t(), scale.float())
    assert torch.equal((packed.scales & 255).t(), zero.int())
    assert torch.equal(pack_codes(Int4Weight(codes(5, 256), scale)).scales & 255, torch.full((4, 5), 8))


def test_a_last_block_is_padded_and_a_row_with_one_scale_is_one_group() -> None:
    packed = pack_codes(Int4Weight(codes(2, 320), torch.ones(2, 1)))
    assert (packed.words.shape, packed.scales.shape, packed.group) == ((1, 3, 512), (1, 2), 384)
    packed = pack_codes(Int4Weight(codes(2, 320), torch.ones(2, 10)))
    assert (packed.scales.shape, packed.group) == ((12, 2), 32)


def test_exponents_of_a_block_are_one_word() -> None:
    scale = torch.randint(100, 140, (2, 5), dtype=torch.uint8)
    packed = pack_codes(Mxfp4Weight.from_codes(codes(2, 160), scale))
    assert packed.e2m1
    assert packed.scales.shape == (2, 2)
    for quarter in range(5):
        word = packed.scales[quarter // 4] >> (8 * (quarter % 4)) & 255
        assert torch.equal(word, scale[:, quarter].int())


def test_scales_of_nvfp4_are_bytes_that_are_never_subnormal() -> None:
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # from 0 to 448
    scale = torch.cat((every, every[:1])).view(2, 64)
    factor = torch.rand(2, 1)
    packed = pack_codes(Nvfp4Weight.from_codes(codes(2, 1024), scale, factor))
    assert packed.scales.shape == (17, 2)
    assert torch.equal(packed.scales[16].view(torch.float32), factor[:, 0] * 1024)
    for group in range(64):
        block, quarter, half = group // 8, group % 8 // 2, group % 2
        byte = packed.scales[2 * block + half] >> (8 * quarter) & 255
        assert torch.equal((byte << 20).view(torch.float32) * 2.0**117, scale[:, group].float())
        assert ((byte == 0) | (byte >= 8)).all()


def test_codes_whose_scale_is_0_are_0() -> None:
    scale = torch.ones(16, 8).to(torch.float8_e4m3fn)
    scale[3, 2] = 0  # the first half of the second quarter
    given = torch.full((16, 128), 15, dtype=torch.uint8)
    packed = pack_codes(Nvfp4Weight.from_codes(given, scale, torch.ones(16, 1)))
    given[3, 32:48] = 0
    other = pack_codes(Nvfp4Weight.from_codes(given, torch.ones(16, 8).to(torch.float8_e4m3fn), torch.ones(16, 1)))
    assert torch.equal(packed.words, other.words)


def test_the_identity_order_is_dropped() -> None:
    order = torch.randperm(128).roll(1)
    assert pack_codes(Int4Weight(codes(2, 128), torch.ones(2, 1), order=torch.arange(128))).order is None
    assert pack_codes(Int4Weight(codes(2, 128), torch.ones(2, 1), order=order)).order is order


def test_groups_without_a_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16 columns have no kernel: 32, 64"):
        pack_codes(Int4Weight(codes(2, 128), torch.ones(2, 8)))


def test_weights_without_contents_have_the_same_shapes() -> None:
    weight = Int4Weight(codes(40, 320), torch.ones(40, 10), torch.ones(40, 10, dtype=torch.uint8), torch.arange(320))
    there = pack_codes(weight)
    empty = pack_codes(
        Int4Weight(
            *(
                tensor.to("meta")
                for tensor in (weight.codes, weight.scale, weight.zero, weight.order)
                if tensor is not None
            )
        )
    )
    assert (empty.words.shape, empty.scales.shape) == (there.words.shape, there.scales.shape)
    assert (empty.group, empty.rows, empty.columns) == (there.group, 40, 320)


def test_spread_codes_are_bfloat16_numbers_that_lack_a_power_of_two() -> None:
    each = torch.arange(16, dtype=torch.uint8)
    for number, own in enumerate(
        torch.eye(4, dtype=torch.uint8)
    ):  # the quarter's codes, with other codes in the other quarters
        words = spread(own[:, None] * each + (1 - own[:, None]) * each.flip(0)).int()
        bits = (
            words << (6, 3, 0)[number] if number < 3 else words >> 3 & 0x180 | words >> 7 & 0x40 | words << 1 & 0x8000
        )
        numbers = ((bits & 0x81C0) << 16).view(torch.float32) * 2.0**126
        assert numbers.tolist() == [*E2M1, *(-value for value in E2M1)]
