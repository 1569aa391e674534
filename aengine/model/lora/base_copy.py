"""Checks the copy of the base model's output matrix that PEFT may store in an adapter.

PEFT stores the copy if the adapter changes the output matrix, and replaces the base's matrix by it. This engine does
not replace the matrix, so the copy must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from aengine.errors import AdapterError, WeightsError
from aengine.model.checkpoint.safetensors import TensorEntry
from aengine.model.checkpoint.weights import find_stored
from aengine.model.families.wrappers import LANGUAGE_MODEL
from aengine.model.groups import DTYPES, FLOATS

_OUTER = ("", *LANGUAGE_MODEL)  # prefixes of names if the base is the language model of a multimodal model
# The first of these tensors that the base has is its output matrix.
_NAMES = tuple(
    f"{outer}{name}"
    for name in ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
    for outer in _OUTER
)
_PIECE_BYTES = 32 * 2**20


def check_copy(path: Path, name: str, entry: TensorEntry, base: Path | None) -> None:
    """Compare a copy of the output matrix in an adapter's file with the base's own.

    base: the base's folder. None: the base has random weights.
    Raises `AdapterError` if the numbers differ after rounding to the coarser dtype, or if the base cannot be read.
    """
    leave_out = "save the adapter with save_embedding_layers=False, which leaves it out"
    if base is None:
        raise AdapterError(f"{path}: {name} cannot be compared with the base, which has random weights; {leave_out}")
    try:
        found = next((found for one in _NAMES if (found := find_stored(base, one)) is not None), None)
    except WeightsError as error:
        raise AdapterError(f"{path}: {name} cannot be compared with the base: {error}; {leave_out}") from None
    if found is None or found[1].dtype not in FLOATS:
        raise AdapterError(f"{path}: {name} cannot be compared with the base, which has no such matrix; {leave_out}")
    if entry.dtype not in FLOATS or entry.shape != found[1].shape:
        raise AdapterError(
            f"{path}: {name} is {entry.dtype} {list(entry.shape)}, in the base it is {found[1].dtype} "
            f"{list(found[1].shape)}; the adapter belongs to another base model"
        )
    coarser = max(DTYPES[entry.dtype], DTYPES[found[1].dtype], key=lambda dtype: torch.finfo(dtype).eps)
    try:
        pieces = zip_longest(_pieces(path, entry), _pieces(*found))
        same = all(
            one is not None and other is not None and torch.equal(one.to(coarser), other.to(coarser))
            for one, other in pieces
        )
    except OSError as error:
        raise AdapterError(f"{path}: {name} cannot be compared with the base: {error}") from error
    if not same:
        raise AdapterError(
            f"{path}: {name} is not the base's own output matrix, which PEFT would replace; merge it into the base, or "
            f"{leave_out}"
        )


def _pieces(path: Path, entry: TensorEntry) -> Iterator[Tensor]:
    """Yield the numbers in order, in pieces of equal counts for every dtype."""
    dtype = DTYPES[entry.dtype]
    each = _PIECE_BYTES // 8 * dtype.itemsize
    with path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        for begin in range(0, entry.nbytes, each):
            data = bytearray(file.read(min(each, entry.nbytes - begin)))
            if not data or len(data) % dtype.itemsize:
                return
            yield torch.frombuffer(data, dtype=dtype)
