"""How sums and gathers are cut into programs, by their size: measured on two H200s (bench/KERNELS.md)."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.kernels.collective.mailboxes import LANE, LANES, PROGRAMS
from aengine.kernels.launch import find_borders, power_of_two

FUSED_BYTES = 3 << 20
FUSED_LANES = 1024  # of a row
AT_ONCE_ROWS = 128  # with a norm, a processor each


@dataclass(frozen=True, slots=True)
class Pushed:
    """How what is pushed is cut."""

    lanes: int  # a program takes at once; with a norm those of a token
    num_warps: int
    programs: int = PROGRAMS


@dataclass(frozen=True, slots=True)
class Pulled:
    """How what is pulled is cut."""

    block: int  # elements a program takes at once
    num_warps: int
    programs: int


OVERLAPPED_ROWS = 4096  # of a step from which on one half is added up beside the other half's products
ROW_TILE = 128  # rows that matrix products take at once
BESIDE = Pulled(4096, 16, 32)  # processors enough for the link; the others multiply


def sum_config(lanes: int, count: int) -> Pushed | Pulled:
    """For so many lanes of `count` ranks.

    Pushed, count - 1 times the bytes of a part go through each link; pulled, that times 2 / count. Against this stand
    7 us for telling addresses and parting, as long as 2 MB take.
    """
    return _pushed(lanes) if lanes <= _most_pushed(count) else Pulled(8192, 32, 24)


def sum_borders(row: int, count: int, most: int) -> list[int]:
    """Return the numbers of rows below `most` after which sums, with a norm or without, use another config.

    row: lanes of each; count: ranks.
    """

    def configs(rows: int) -> tuple[object, ...]:
        return sum_config(rows * row, count), norm_config(rows, row, count), len(sum_pieces(rows))

    return find_borders(configs, most)


def sum_pieces(rows: int) -> list[slice]:
    """Which rows are added up together, beside others' products."""
    if rows < OVERLAPPED_ROWS:
        return [slice(0, rows)]
    half = rows // 2 // ROW_TILE * ROW_TILE
    return [slice(0, half), slice(half, rows)]


def norm_config(rows: int, row: int, count: int) -> Pushed | None:
    """For rows of so many lanes; None where a norm of its own is faster."""
    if rows * row * LANE * (count - 1) > FUSED_BYTES or row > FUSED_LANES:
        return None
    warps = min(16, max(1, power_of_two(row) // 32))
    # Where rows fill no power of two and processors take turns, fewer threads that all have something to do are faster.
    return Pushed(row, warps // 2 if rows > AT_ONCE_ROWS and row != power_of_two(row) and warps > 1 else warps)


def gather_config(lanes: int, count: int) -> Pushed | Pulled:
    """For so many lanes of each of `count` ranks: pushed where a mailbox holds them."""
    return _pushed(lanes) if lanes <= LANES // count else Pulled(8192, 32, 128)


def _pushed(lanes: int) -> Pushed:
    return Pushed(128, 4) if lanes <= 32768 else Pushed(256, 8) if lanes <= 65536 else Pushed(512, 16)


def _most_pushed(count: int) -> int:
    """Lanes of a sum."""
    return LANES // count if count == 2 else (2 << 20) * count // ((count - 1) * (count - 2)) // LANE
