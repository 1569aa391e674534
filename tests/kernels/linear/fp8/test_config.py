from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from aengine.kernels.launch import Launch
from aengine.kernels.linear.fp8.config import (
    few_rows_config,
    few_tiles_config,
    fp8_borders,
    many_rows_config,
    pieces_of_k,
    rounded_rows_config,
)
from aengine.kernels.linear.fp8.few_tiles import FewTilesConfig
from aengine.kernels.linear.fp8.one_row import OneRowConfig

H200, SMALL = Launch(132, True, 227 * 1024, (9, 0)), Launch(128, False, 99 * 1024, (8, 9))
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (5120, 25600),
    (1024, 3072),
    (128, 16),
    (96, 400),
    (151936, 1024),
    (512, 1152),
]


@pytest.mark.parametrize("launch", [H200, SMALL], ids=["H200", "small"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_cut_divides_the_groups_and_fits(n: int, k: int, launch: Launch) -> None:
    groups = -(-k // 128)
    for m in range(1, 65):
        config = few_rows_config(m, n, k, 2, launch)
        assert config is not None
        assert isinstance(config, OneRowConfig) == (m == 1)
        if not isinstance(config, OneRowConfig):
            assert groups % config.splits == 0
            assert 0 <= config.early <= min(2, groups // config.splits)
        assert config.shared_memory(m, 2) <= launch.shared_memory
    for m in (1, 65, 256, 8192, 16384):
        assert many_rows_config(m, n, launch).shared_memory() <= launch.shared_memory
    assert few_rows_config(65, n, k, 2, launch) is None
    assert few_rows_config(0, n, k, 2, launch) is None


def test_both_steps_of_one_row_are_in_flight_unless_few_programs_have_all_rows() -> None:
    """The shapes are qkv and o of an 8B and of a 30B-A3B."""
    cuts = [few_rows_config(1, n, k, 2, H200) for n, k in ((6144, 4096), (4096, 4096), (5120, 2048), (2048, 4096))]
    assert cuts == [
        OneRowConfig(4, 4, 16, 2),
        OneRowConfig(8, 4, 16, 1),
        OneRowConfig(4, 4, 16, 1),
        OneRowConfig(4, 4, 16, 2),
    ]


def test_few_tiles_are_split_along_k_and_many_are_not() -> None:
    assert {few_rows_config(16, n, k, 2, H200).splits for n, k in SHAPES[:2]} == {2, 4}  # type: ignore[union-attr]
    assert few_rows_config(16, 24576, 4096, 2, H200).splits == 1  # type: ignore[union-attr]
    assert many_rows_config(8192, 24576, H200).block_n > many_rows_config(128, 4096, H200).block_n


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_one_row_fills_the_device_and_has_no_more_steps_than_it_needs(n: int, k: int) -> None:
    config = few_rows_config(1, n, k, 2, H200)
    assert isinstance(config, OneRowConfig)
    assert config.block_n == 2 or n >= 2 * config.block_n * H200.processors
    assert config.width <= 16
    assert config.width * 128 < k + 128
    steps = -(-k // (config.width * 128))
    assert config.ahead in ((1, 2) if steps == 2 else (2,) if steps > 2 else (1,))


@pytest.mark.parametrize(("n", "k"), [shape for shape in SHAPES if shape[1] % 256 == 0])
def test_few_tiles_have_a_processor_each_and_all_pieces_are_equal(n: int, k: int) -> None:
    for m in (33, 65, 96, 128, 200, 256, 400, 8192):
        config = few_tiles_config(m, n, k, H200)
        assert (config is None) == (-(-m // 64) * -(-n // 128) > H200.processors)
        if config is not None:
            assert -(-m // 64) * -(-n // config.block_n) * config.splits <= H200.processors
            assert k // 256 % config.splits == 0
            assert config.shared_memory() <= H200.shared_memory


@pytest.mark.parametrize(
    ("m", "n", "k", "block_n", "splits"),
    [(256, 4096, 4096, 128, 1), (256, 4096, 12288, 128, 1), (128, 6144, 4096, 128, 1), (128, 4096, 4096, 64, 1),
     (128, 4096, 12288, 128, 2), (64, 6144, 4096, 64, 1), (64, 4096, 4096, 64, 2), (64, 4096, 12288, 64, 2)],
)  # fmt: skip
def test_few_tiles_are_cut_as_measured(m: int, n: int, k: int, block_n: int, splits: int) -> None:
    assert few_tiles_config(m, n, k, H200) == FewTilesConfig(64, block_n, splits, 4, 4)


@pytest.mark.parametrize(
    ("m", "n", "k", "pieces"),
    [(256, 4096, 12288, 2), (129, 4096, 12288, 2), (128, 4096, 12288, 3), (65, 4096, 12288, 3), (128, 4096, 14336, 4),
     (256, 4096, 14336, 2), (256, 3584, 18944, 2), (128, 5120, 25600, 2), (256, 4096, 4096, 2)],
)  # fmt: skip
def test_pieces_of_k_are_as_many_as_measured(m: int, n: int, k: int, pieces: int) -> None:
    assert pieces_of_k(m, n, k, H200) == pieces


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(64, 4096, 12288), (257, 4096, 12288), (128, 4096, 4096), (128, 4096, 6144), (128, 4096, 8192), (256, 2048, 4096),
     (256, 6144, 4096), (256, 5120, 25600), (256, 4096, 12288 + 64), (256, 4096 + 16, 12288), (256, 1024, 12288),
     (256, 4096, 128 * 97)],
)  # fmt: skip
def test_other_tiles_short_rows_and_unequal_pieces_stay_whole(m: int, n: int, k: int) -> None:
    assert pieces_of_k(m, n, k, H200) == 1


def test_shapes_that_few_tiles_do_not_support_are_left_to_the_library() -> None:
    assert few_tiles_config(128, 4096, 4096 + 128, H200) is None
    assert few_tiles_config(128, 4096, 4096, replace(H200, shared_memory=99 * 1024)) is None
    assert few_tiles_config(32, 4096, 4096, H200) is None


@pytest.mark.slow
@pytest.mark.parametrize("launch", [H200, SMALL], ids=["H200", "small"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_tiles_change_after_a_border_only(n: int, k: int, launch: Launch) -> None:
    def cut(m: int) -> object:
        on_hopper = (pieces_of_k, few_tiles_config) if launch.capability[0] == 9 else ()
        return *(config(m, n, k, launch) for config in on_hopper), many_rows_config(m, n, launch)

    borders = fp8_borders(n, k, launch, 16384)
    assert {1, 16, 32, 64} <= set(borders)
    assert borders == sorted(set(borders))
    changes = [m for m in range(65, 16384) if cut(m) != cut(m + 1)]
    assert changes == [border for border in borders if border > 64]


@pytest.mark.parametrize("launch", [H200, SMALL])
@pytest.mark.parametrize("n", [64, 256, 40_000])
@pytest.mark.parametrize("k", [64, 128, 256, 512, 4096])
def test_rounded_rows_load_no_early_group_outside_their_piece(n: int, k: int, launch: Launch) -> None:
    for m in (2, 16, 17, 32, 33, 64):
        config = rounded_rows_config(m, n, k, launch)
        assert config is not None
        assert 0 < config.early <= -(-k // 128) // config.splits
