"""How sums and gathers are cut into programs, by their size: measured on two H200s (bench/KERNELS.md)."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.kernels.collective.mailboxes import LANE, LANES, PROGRAMS
from aengine.kernels.launch import power_of_two

FUSED_BYTES = 3 << 20
FUSED_LANES = 1024  # of a row
AT_ONCE_ROWS = 128  # with a norm, a processor each
PUSHED_BORDERS = 32768, 65536  # lanes up to which programs take few, or some


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


def sum_borders(row: int, count: int) -> set[int]:
    """Up to how many rows of so many lanes sums are cut alike, with a norm and without, and beside products."""
    fused = FUSED_BYTES // (row * LANE * (count - 1))
    lanes = (*PUSHED_BORDERS, _most_pushed(count))
    return {rows for rows in (AT_ONCE_ROWS, fused, *(most // row for most in lanes), OVERLAPPED_ROWS - 1) if rows}


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
    few, some = PUSHED_BORDERS
    return Pushed(128, 4) if lanes <= few else Pushed(256, 8) if lanes <= some else Pushed(512, 16)


def _most_pushed(count: int) -> int:
    """Lanes of a sum."""
    return LANES // count if count == 2 else (2 << 20) * count // ((count - 1) * (count - 2)) // LANE
