from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from aengine.kernels.attention.config import decode_borders, decode_config, tile_queries
from aengine.kernels.launch import Launch

H200 = Launch(processors=132, overlap=True, shared_memory=227 * 1024)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 256])
def test_the_bytes_in_flight_do_not_depend_on_the_dtype_of_the_cache(rows: int, dim: int) -> None:
    values, codes = (decode_config(rows, 4, dim, 2, H200, kept_size=kept) for kept in (2, 1))
    crowd = 4 if rows == 1 and dim == 128 else values.crowd  # one row has a fourth program on each processor
    assert (codes.stages - 1) * codes.block * codes.crowd == 2 * (values.stages - 1) * values.block * crowd


def test_many_rows_of_codes_have_twice_as_many_programs_with_one_warp() -> None:
    config = decode_config(256, 4, 128, 2, H200, kept_size=1)
    assert (config.warps, config.crowd) == (1, 8)
    assert decode_config(256, 10, 128, 2, H200, kept_size=1).warps == 2  # their queries need the registers of two warps


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize(
    ("kept", "shared", "window"), [(2, False, None), (1, False, None), (2, True, None), (2, False, 64)]
)
def test_configs_change_only_at_borders(dim: int, group: int, kept: int, shared: bool, window: int | None) -> None:
    cuts = [decode_config(rows, group, dim, 2, H200, shared, kept, window) for rows in range(1, 514)]
    changes = {rows for rows, (cut, following) in enumerate(pairwise(cuts), start=1) if cut != following}
    assert changes <= {*decode_borders(H200, 513)}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("columns", [6, 20, 64])
@pytest.mark.parametrize("kept", [1, 2])
def test_configs_of_several_queries_change_at_the_same_borders(dim: int, columns: int, kept: int) -> None:
    cuts = [decode_config(rows, columns, dim, 2, H200, kept_size=kept, drafted=True) for rows in range(1, 514)]
    changes = {rows for rows, (cut, following) in enumerate(pairwise(cuts), start=1) if cut != following}
    assert changes <= {*decode_borders(H200, 513)}


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 17])
def test_tiles_of_queries_are_even_and_their_results_fit_registers(queries: int, group: int, dim: int) -> None:
    tile = tile_queries(queries, group, dim)
    tiles = -(-queries // tile)
    assert tile == 1 or tile * group * dim <= 8192
    assert tiles * tile - queries < tiles  # a smaller tile would need more of them


def test_five_queries_of_four_heads_read_their_keys_once() -> None:
    assert tile_queries(5, 4, 128) == 5
    assert tile_queries(5, 8, 128) == 5
    assert tile_queries(5, 16, 128) == 3


def test_a_row_of_many_columns_has_four_warps() -> None:
    assert decode_config(64, 32, 128, 2, H200, drafted=True).warps == 2
    assert decode_config(64, 40, 128, 2, H200, drafted=True).warps == 4
    assert decode_config(64, 40, 128, 2, H200).warps == 2  # one query of 40 heads, as before


def test_heads_that_fill_a_product_have_programs_of_one_warp() -> None:
    config = {rows: decode_config(rows, 8, 128, 2, H200) for rows in (1, 2, 64, 128, 129, 256)}
    assert [(cut.stages, cut.warps, cut.crowd) for rows, cut in config.items() if 2 <= rows <= 128] == 3 * [(4, 1, 4)]
    assert [(cut.stages, cut.warps, cut.crowd) for rows, cut in config.items() if rows > 128] == 2 * [(2, 1, 8)]
    assert config[1].warps == 2
    others = [decode_config(64, group, 128, 2, H200) for group in (4, 9)]
    others += [decode_config(64, 8, 128, 2, H200, shared=True), decode_config(64, 8, 128, 2, H200, kept_size=1)]
    others += [decode_config(64, 8, 128, 2, replace(H200, shared_memory=163 * 1024))]  # too little for four programs
    assert {cut.warps for cut in others} == {2}  # as measured


def test_one_row_has_few_parts() -> None:
    pieces = {
        (rows, dim, group): decode_config(rows, group, dim, 2, H200).piece
        for rows in (1, 2)
        for dim in (64, 128)
        for group in (2, 4, 8)
    }
    assert {case for case, piece in pieces.items() if piece == 2} == {(1, 128, 4), (1, 128, 8)}
    assert decode_config(1, 4, 128, 2, H200, kept_size=1).piece == 1  # its blocks are twice as long


def test_operands_that_stay_in_shared_memory_are_counted() -> None:
    config = decode_config(16, 4, 128, 2, H200)
    assert config.warps == 4
    assert config.shared_memory(4, 128, 2, warp_groups=True) == config.shared_memory(4, 128, 2) + 2 * 128 * 128 * 2


def test_a_pool_of_the_models_own_dtype_changes_nothing() -> None:
    for rows in (1, 8, 256):
        assert decode_config(rows, 4, 128, 2, H200) == decode_config(rows, 4, 128, 2, H200, kept_size=2)


def test_a_window_of_few_keys_is_for_one_program() -> None:
    windowed = [decode_config(rows, 8, 64, 2, H200, window=128).block for rows in (1, 2, 8)]
    assert windowed == [128, 128, 32]
    assert decode_config(1, 8, 64, 2, H200, window=129) == decode_config(1, 8, 64, 2, H200)


def test_heads_of_256_have_small_programs_for_few_rows_or_large_parts() -> None:
    small = {
        (rows, group)
        for rows in (1, 2, 256)
        for group in (2, 4, 8)
        if decode_config(rows, group, 256, 2, H200).crowd == 4
    }
    assert small == {(1, 2), (1, 4), (1, 8), (2, 8), (256, 8)}
    others = [
        decode_config(1, 2, 512, 2, H200),
        decode_config(1, 16, 256, 2, H200),
        decode_config(256, 8, 256, 2, H200, shared=True),
        decode_config(1, 2, 256, 2, H200, kept_size=1),
    ]
    assert {config.warps for config in others} == {4}  # as measured
