"""Cuts tensors of a safetensors file into pieces that fit into a staging buffer and go to one or several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aengine.model.checkpoint.safetensors import TensorEntry
from aengine.model.groups import DTYPES, Cut


@dataclass(frozen=True, slots=True)
class Destination:
    """The memory for some elements of a piece, which is a matrix of `rows` rows: columns `start` to `stop`."""

    rows: int
    start: int
    stop: int
    into: Tensor  # [rows, stop - start]; floats are converted to its dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring elements of one tensor: their bytes in a file, and their memory on devices."""

    path: Path
    name: str  # of the tensor in the file
    start: int  # of its first byte, in the file
    nbytes: int
    dtype: torch.dtype  # in the file
    destinations: tuple[Destination, ...]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's memory for a tensor, or for the part of it that the rank reads."""

    into: Tensor  # contiguous, with the shape of the part; it may have another dtype than the file
    cut: Cut | None = None  # the part that the rank reads. None: all of the tensor.


def cut(path: Path, name: str, entry: TensorEntry, places: Sequence[RankMemory], most_bytes: int) -> Iterator[Piece]:
    """Yield a tensor as pieces of at most `most_bytes` each, in the order of the file.

    places: one for each rank that reads the tensor. If they are cut, all are cut along the same axis.
    """
    dtype = DTYPES[entry.dtype]
    most = most_bytes // dtype.itemsize
    axis = next((place.cut.axis for place in places if place.cut is not None), 0)
    outer, row = math.prod(entry.shape[:axis]), math.prod(entry.shape[axis:])
    inner = math.prod(entry.shape[axis + 1 :])
    if outer > 1 and row <= most:
        spans = [(first, min(first + most // row, outer)) for first in range(0, outer, most // row)]
        runs = [(first * row, last * row, _columns(places, first, last, outer, inner)) for first, last in spans]
    else:  # each row by itself, in pieces
        runs = [
            (at * row + first, at * row + last, _run(places, at, first, last, outer, inner))
            for at in range(outer)
            for first, last in ((first, min(first + most, row)) for first in range(0, row, most))
        ]
    for first, last, destinations in runs:
        start, nbytes = entry.start + first * dtype.itemsize, (last - first) * dtype.itemsize
        yield Piece(path, name, start, nbytes, dtype, tuple(destinations))


def _columns(places: Sequence[RankMemory], first: int, last: int, outer: int, inner: int) -> list[Destination]:
    """Return the destinations of whole rows from `first` to `last`."""
    destinations = []
    for place in places:
        kept = place.into.view(outer, place.into.numel() // outer)[first:last]
        if place.cut is None:
            destinations.append(Destination(1, 0, kept.numel(), kept.view(1, -1)))
            continue
        at = 0
        for start, stop in place.cut.ranges:
            width = (stop - start) * inner
            destinations.append(Destination(last - first, start * inner, stop * inner, kept[:, at : at + width]))
            at += width
    return destinations


def _run(places: Sequence[RankMemory], row: int, first: int, last: int, outer: int, inner: int) -> list[Destination]:
    """Return the destinations of the elements from `first` to `last` of one row."""
    destinations = []
    for place in places:
        kept = place.into.view(outer, place.into.numel() // outer)[row]
        at = 0
        for start, stop in ((0, kept.numel()),) if place.cut is None else place.cut.ranges:
            begin, end = (start, stop) if place.cut is None else (start * inner, stop * inner)
            low, high = max(begin, first), min(end, last)
            if low < high:
                into = kept[at + low - begin : at + high - begin]
                destinations.append(Destination(1, low - first, high - first, into.view(1, -1)))
            at += end - begin
    return destinations
