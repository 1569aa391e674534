"""The pieces of a tensor have every byte once, in the order of the file. None is larger than a buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aengine.model.checkpoint.pieces import DTYPES, Piece, RankMemory, cut
from aengine.model.checkpoint.safetensors import TensorEntry
from aengine.model.groups import Cut

PATH = Path("model.safetensors")


def read(pieces: Sequence[Piece], stored: Tensor, start: int) -> None:
    """Copy every piece to its memory, as staging buffers do."""
    flat = stored.view(-1)
    for piece in pieces:
        first = (piece.start - start) // piece.dtype.itemsize
        part = flat[first : first + piece.nbytes // piece.dtype.itemsize]
        for destination in piece.destinations:
            destination.into.copy_(part.view(destination.rows, -1)[:, destination.start : destination.stop])


@given(
    stored=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(1, 9), max_size=3),
    most_bytes=st.integers(8, 200),
    start=st.integers(0, 1000),
)
def test_pieces_tile_the_file_and_the_tensor(stored: str, shape: list[int], most_bytes: int, start: int) -> None:
    count = math.prod(shape)
    values, into = torch.arange(1.0, count + 1).view(shape), torch.zeros(shape)
    entry = TensorEntry(stored, tuple(shape), start, start + count * DTYPES[stored].itemsize)
    pieces = list(cut(PATH, "a", entry, [RankMemory(into)], most_bytes))
    at = start
    for piece in pieces:
        assert piece.start == at
        assert 0 < piece.nbytes <= most_bytes
        at += piece.nbytes
    assert at == start + entry.nbytes
    read(pieces, values, start)
    assert into.equal(values)


@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    most_bytes=st.integers(4, 400),
    ranks=st.integers(1, 4),
)
def test_each_rank_gets_its_ranges_of_the_one_reading(
    data: st.DataObject, shape: list[int], most_bytes: int, ranks: int
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    values = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    entry = TensorEntry("F32", tuple(shape), 0, values.numel() * 4)
    places, expected = [], []
    for _ in range(ranks):
        if data.draw(st.booleans()):
            places.append(RankMemory(torch.zeros(shape)))
            expected.append(values)
            continue
        borders = sorted(data.draw(st.lists(st.integers(0, shape[axis]), min_size=4, max_size=4)))
        ranges = ((borders[0], borders[1]), (borders[2], borders[3]))
        kept = Cut(axis, ranges)
        places.append(RankMemory(torch.zeros(kept.kept_shape(shape)), kept))
        expected.append(torch.cat([values.narrow(axis, low, high - low) for low, high in ranges], axis))
    pieces = list(cut(PATH, "a", entry, places, most_bytes))
    assert [piece.start for piece in pieces] == sorted({piece.start for piece in pieces})
    assert sum(piece.nbytes for piece in pieces) == entry.nbytes
    assert all(piece.nbytes <= most_bytes for piece in pieces)
    read(pieces, values, 0)
    for place, tensor in zip(places, expected):
        assert place.into.equal(tensor)


def test_a_buffer_is_used_to_the_last_element_that_fits() -> None:
    pieces = list(cut(PATH, "a", TensorEntry("F32", (10,), 64, 104), [RankMemory(torch.zeros(10))], most_bytes=19))
    assert [(piece.start, piece.nbytes) for piece in pieces] == [(64, 16), (80, 16), (96, 8)]


def test_a_parameter_that_is_not_in_one_piece_is_refused_instead_of_filled_in_a_copy() -> None:
    with pytest.raises(RuntimeError, match="view"):
        list(cut(PATH, "a", TensorEntry("F32", (4, 2), 0, 32), [RankMemory(torch.zeros(2, 4).T)], most_bytes=64))
