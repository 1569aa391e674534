"""How sums and gathers are divided into programs, by size. Measured on two H200s (bench/KERNELS.md)."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.kernels.collective.mailboxes import LANE, LANES, PROGRAMS
from aengine.kernels.launch import find_borders, power_of_two

FUSED_BYTES = 3 << 20  # the most bytes that a rank sends in a sum with a fused norm
FUSED_LANES = 1024  # the most lanes of a row in such a sum
AT_ONCE_ROWS = 128  # the most rows in such a sum of which each has its own processor


@dataclass(frozen=True, slots=True)
class Pushed:
    """How a kernel that pushes divides its data."""

    lanes: int  # lanes of a program's iteration; with a norm all lanes of a token
    num_warps: int
    programs: int = PROGRAMS


@dataclass(frozen=True, slots=True)
class Pulled:
    """How a kernel that pulls divides its data."""

    block: int  # elements of a program's iteration
    num_warps: int
    programs: int


OVERLAPPED_ROWS = 4096  # steps with so many rows are halved: a half's sum overlaps with the other half's products
ROW_TILE = 128  # rows of a tile of matrix products
OVERLAPPED_SUM = Pulled(4096, 16, 32)  # these programs fill the link; the other processors multiply


def sum_config(lanes: int, count: int) -> Pushed | Pulled:
    """Return the config of a sum over `count` ranks. lanes: number of lanes of a part.

    Pushing sends a part's bytes count - 1 times through each link. Pulling sends 2 / count of that, but exchanging
    addresses and waiting at the end take 7 us, the time of 2 MB.
    """
    return _pushed(lanes) if lanes <= _most_pushed(count) else Pulled(8192, 32, 24)


def sum_borders(row: int, count: int, most: int) -> list[int]:
    """Return the numbers of rows below `most` after which sums, with a norm or without, use another config.

    row: lanes of a row. count: number of ranks.
    """

    def configs(rows: int) -> tuple[object, ...]:
        return sum_config(rows * row, count), norm_config(rows, row, count), len(sum_pieces(rows))

    return find_borders(configs, most)


def sum_pieces(rows: int) -> list[slice]:
    """Return the pieces of a step's rows. A piece is summed while the next piece is multiplied."""
    if rows < OVERLAPPED_ROWS:
        return [slice(0, rows)]
    half = rows // 2 // ROW_TILE * ROW_TILE
    return [slice(0, half), slice(half, rows)]


def norm_config(rows: int, row: int, count: int) -> Pushed | None:
    """Return the config of a sum with a fused norm, or None if a separate norm is faster. row: lanes of a row."""
    if rows * row * LANE * (count - 1) > FUSED_BYTES or row > FUSED_LANES:
        return None
    warps = min(16, max(1, power_of_two(row) // 32))
    # If a row is no power of two and processors take several rows, fewer threads, none of them idle, are faster.
    return Pushed(row, warps // 2 if rows > AT_ONCE_ROWS and row != power_of_two(row) and warps > 1 else warps)


def gather_config(lanes: int, count: int) -> Pushed | Pulled:
    """Return the config of a gather: pushed if a mailbox holds the lanes of each rank."""
    return _pushed(lanes) if lanes <= LANES // count else Pulled(8192, 32, 128)


def _pushed(lanes: int) -> Pushed:
    return Pushed(128, 4) if lanes <= 32768 else Pushed(256, 8) if lanes <= 65536 else Pushed(512, 16)


def _most_pushed(count: int) -> int:
    """Return the largest sum that is pushed, in lanes."""
    return LANES // count if count == 2 else (2 << 20) * count // ((count - 1) * (count - 2)) // LANE
