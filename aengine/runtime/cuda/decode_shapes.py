"""The sizes of decode steps that are captured, and the variants of each size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from aengine.runtime.speculation.runs import draft_counts
from aengine.sampling.sampler import Kind

CAPTURED_KINDS = (Kind.SIMPLE, Kind.FILTERED)  # the host chooses the kernels of the other kinds of draw
LEAST_SHARERS = 4  # rows; a smaller batch gains too little from shared runs of pages
# Batch sizes to capture. Such steps mostly read weights, so padding a batch to the next size makes a step at most about
# 4 % longer (H200; 8B bf16, 30B-A3B, gpt-oss-20b; bench/KERNELS.md).
SMALL_SIZES = (1, 2, 3, 4, 8, 16, 20, 32, 40, 48, 64)
LEAST_USED = 0.87  # least share of rows in use if a batch is padded to a size above SMALL_SIZES
BORDER = 128  # rows; with more rows, matrix products use slower kernels, and a step takes up to 20 % longer
# Drafts are worth their time while a step mostly reads weights. Then padding costs little, so few sizes are captured.
DRAFTED_ROWS = (1, 2, 4, 8, 16, 32, 64)
MOST_PLACES = 320


class DecodeShape(NamedTuple):
    """The size of a captured step."""

    rows: int
    drafts: int = 0  # of each row

    @property
    def queries(self) -> int:
        """The tokens of each row."""
        return 1 + self.drafts

    @property
    def places(self) -> int:
        """The tokens of the step. It draws at each of them."""
        return self.rows * self.queries


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture, ascending, `max_rows` last."""
    sizes = [size for size in SMALL_SIZES if size < max_rows]
    while (following := int(((sizes[-1] if sizes else 0) + 1) / LEAST_USED)) < max_rows:
        sizes.append(BORDER if sizes[-1] < BORDER < following else following)
    return [*sizes, max_rows]


def shared_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes that are also captured with shared runs: the largest and every second one below it."""
    return [size for size in sizes[::-1][::2] if size >= LEAST_SHARERS][::-1]


def drafted_shapes(max_rows: int, most_drafts: int) -> list[DecodeShape]:
    """Return the steps with drafts that are captured. Larger ones are launched kernel by kernel."""
    rows = sorted({min(size, max_rows) for size in DRAFTED_ROWS})
    shapes = [DecodeShape(*shape) for shape in itertools.product(rows, draft_counts(most_drafts))]
    return [shape for shape in shapes if shape.places <= MOST_PLACES]


class ForwardKind(NamedTuple):
    """A variant of the first graph of a step, the forward pass."""

    shared: bool = False  # whether pages that several rows share are read once for all of them
    adapted: bool = False  # whether rows may have adapters


class EndKind(NamedTuple):
    """A variant of the second graph of a step, which draws."""

    draws: Kind
    is_read: bool = True  # whether the proposer reads the step
