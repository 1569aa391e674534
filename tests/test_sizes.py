"""Numbers with units."""

from __future__ import annotations

import pytest

from aengine.sizes import format_bytes, parse_count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1536, "1.5 KiB"),
        (10_000, "10,000 bytes"),
        (2**25, "32 MiB"),
        (123_456_789, "117.7 MiB"),
        (5 * 2**40, "5 TiB"),
    ],
)
def test_bytes_are_written_with_their_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("text", ["64", "k", "1.5", "1 k k", "-1k", "1e3k", "5 apples"])
def test_what_has_no_unit_is_not_read(text: str) -> None:
    assert parse_count(text) is None
