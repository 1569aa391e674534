"""The base's output matrix, of which PEFT stores a copy beside factors for it: PEFT would load it in the base's place,
so it has to be what the base has.
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

_OUTER = ("", *LANGUAGE_MODEL)  # what stands before the names where the base is the language model of one that sees
# The first that the base has.
_NAMES = tuple(
    f"{outer}{name}"
    for name in ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
    for outer in _OUTER
)
_PIECE_BYTES = 32 * 2**20


def check_copy(path: Path, name: str, entry: TensorEntry, base: Path | None) -> None:
    """Compare a copy of the output matrix in an adapter's file with the base's own; base: its folder.

    Raises `AdapterError` unless they are the same numbers, rounded to the coarser of both dtypes, and where the base
    cannot be read: None.
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
    """The numbers in order, as many at once for every dtype."""
    dtype = DTYPES[entry.dtype]
    each = _PIECE_BYTES // 8 * dtype.itemsize
    with path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        for begin in range(0, entry.nbytes, each):
            data = bytearray(file.read(min(each, entry.nbytes - begin)))
            if not data or len(data) % dtype.itemsize:
                return
            yield torch.frombuffer(data, dtype=dtype)
