"""Numbers with units, as people write and read them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "k": 10**3,  # a small letter is decimal and a large one binary, as in vLLM's flags
    "K": 2**10,
    "m": 10**6,
    "M": 2**20,
    "g": 10**9,
    "G": 2**30,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_ROUNDED_FROM = 2**20  # smaller numbers of bytes are never rounded
_NUMBER = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)")


def parse_count(text: str) -> int | None:
    """Return the whole number that a text with a unit names, such as 64MiB or 32k; None for other texts."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS:
        return None
    count = float(found[1]) * _UNITS[found[2]]
    return int(count) if count.is_integer() else None


def format_bytes(count: int) -> str:
    """Return a number of bytes in the largest binary unit: 32 MiB, 1.5 KiB. Small ones stay exact: 10,000 bytes."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size and (count >= _ROUNDED_FROM or count * 10 % size == 0):
            return f"{count / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count:,} {'byte' if count == 1 else 'bytes'}"
