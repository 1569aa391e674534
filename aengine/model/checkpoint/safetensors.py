"""Reads and checks the header of a safetensors file.

A file has three parts: the header's length in 8 little-endian bytes, the header, and the bytes of all tensors. The
header is a JSON object with each tensor's dtype, shape and byte range. The ranges must cover the bytes without gap or
overlap.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from aengine.errors import WeightsError
from aengine.model.fields import shown
from aengine.sizes import format_bytes

SINGLE = "model.safetensors"  # one file with all weights, or the index of several files
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's limit
_MAX_DIMS = 8

_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A header's entry for one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # byte range in the file
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(path: Path, most_bytes: int = MAX_HEADER_BYTES) -> dict[str, TensorEntry]:
    """Return the tensors of a file, by name. Raises `WeightsError` if the header is damaged or inconsistent.

    most_bytes: larger headers are refused.
    """
    header, data_bytes = _read_json(path, most_bytes)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    _check_tiling(path, entries, data_bytes)
    first = path.stat().st_size - data_bytes  # the header counts from its own end
    return {name: replace(entry, start=first + entry.start, end=first + entry.end) for name, entry in entries.items()}


def read_format(path: Path) -> str:
    """Return the library that wrote a file, such as "mlx", or "". Raises `WeightsError` if the header is damaged."""
    metadata = _read_json(path, MAX_HEADER_BYTES)[0].get("__metadata__")
    return str(metadata.get("format", "")) if isinstance(metadata, dict) else ""


def _read_json(path: Path, most_bytes: int) -> tuple[dict[str, object], int]:
    """Return a file's header, and the number of bytes after it."""
    try:
        if not path.is_file():
            raise WeightsError(f"{path}: no such file; the checkpoint is incomplete")
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, most_bytes):
                raise WeightsError(
                    f"{path}: claims a header of {format_bytes(length)} in a file of {format_bytes(size)}; damaged, or "
                    f"no safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    if len(text) != length:
        raise WeightsError(f"{path}: ends within its header")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the header is not a JSON object")
    # Names are printed in errors and logs, so they must not hold control characters.
    if strange := next((name for name in header if not name.isprintable()), None):
        raise WeightsError(f"{path}: the name of a tensor is {shown(strange)}, which is not printable")
    return header, size - 8 - length


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shown(name)} appears twice")
        values[name] = value
    return values


def _entry(path: Path, name: str, value: object) -> TensorEntry:
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    where = f"{path}: {name[:200]}"
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise WeightsError(f"{where} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(_is_size(item) for item in shape):
        raise WeightsError(f"{where} has an invalid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(item) for item in offsets):
        raise WeightsError(f"{where} has invalid data_offsets")
    start, end = offsets
    if end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise WeightsError(f"{where} is {dtype} of shape {shape}, which its {end - start} bytes do not hold")
    return TensorEntry(dtype, tuple(shape), start, end)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_tiling(path: Path, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise WeightsError(f"{path}: {name[:200]} starts at byte {entry.start} where {at} is the next free one")
        at = entry.end
    if at != data_bytes:
        raise WeightsError(
            f"{path}: the header describes {at} bytes of tensors, the file holds {data_bytes}; truncated?"
        )
