"""Tensors of a safetensors file, cut into pieces that fit into a staging buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aengine.model.checkpoint.safetensors import TensorEntry

# As safetensors spells them: floats, and what quantised weights are packed into.
DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring elements of one tensor: their bytes in a file, and their place on a device."""

    path: Path
    name: str  # of the tensor, as the file spells it
    start: int  # of its first byte, in the file
    nbytes: int
    dtype: torch.dtype  # in the file
    into: Tensor  # [elements]; a float may become another float on its way


def cut(path: Path, name: str, entry: TensorEntry, into: Tensor, most_bytes: int) -> Iterator[Piece]:
    """The tensor that `entry` describes as pieces of at most `most_bytes` each, in the order of the file.

    `into` is contiguous and has the tensor's shape; its dtype is its own.
    """
    dtype = DTYPES[entry.dtype]
    start = entry.start
    for part in into.view(-1).split(most_bytes // dtype.itemsize):
        nbytes = part.numel() * dtype.itemsize
        yield Piece(path, name, start, nbytes, dtype, part)
        start += nbytes
