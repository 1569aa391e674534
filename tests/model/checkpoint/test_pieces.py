"""A tensor's pieces are the tensor: every byte of it once, in the order of the file, none larger than a buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.model.checkpoint.pieces import DTYPES, cut
from aengine.model.checkpoint.safetensors import TensorEntry

PATH = Path("model.safetensors")


@given(
    stored=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(1, 9), max_size=3),
    most_bytes=st.integers(8, 200),
    start=st.integers(0, 1000),
)
def test_pieces_tile_the_file_and_the_tensor(stored: str, shape: list[int], most_bytes: int, start: int) -> None:
    into = torch.zeros(shape)
    nbytes = into.numel() * DTYPES[stored].itemsize
    pieces = list(cut(PATH, "a", TensorEntry(stored, tuple(shape), start, start + nbytes), into, most_bytes))
    at = start
    for number, piece in enumerate(pieces):
        assert piece.start == at
        assert 0 < piece.nbytes <= most_bytes
        assert piece.nbytes == piece.into.numel() * piece.dtype.itemsize
        piece.into.fill_(number + 1)
        at += piece.nbytes
    assert at == start + nbytes
    expected = [number + 1 for number, piece in enumerate(pieces) for _ in range(piece.into.numel())]
    assert into.view(-1).tolist() == expected


def test_a_buffer_is_used_to_the_last_element_that_fits() -> None:
    pieces = list(cut(PATH, "a", TensorEntry("F32", (10,), 64, 104), torch.zeros(10), most_bytes=19))
    assert [(piece.start, piece.nbytes) for piece in pieces] == [(64, 16), (80, 16), (96, 8)]


def test_a_parameter_that_is_not_in_one_piece_is_refused_instead_of_filled_in_a_copy() -> None:
    with pytest.raises(RuntimeError, match="view"):
        list(cut(PATH, "a", TensorEntry("F32", (4, 2), 0, 32), torch.zeros(2, 4).T, most_bytes=64))
