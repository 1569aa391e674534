"""The operations that begin a captured step of decodes, and that end it after the draws. Rows may verify drafts.

Every row of the step has the same number of tokens: its last token, and then drafts. A row may have fewer drafts than
that. Its other places are padding. They are computed, but they are never accepted, their keys and values are written to
page 0, and their positions are that of the row's last draft.

The host does not know how many drafts earlier steps have accepted. So the device makes all inputs, and it counts the
turns of the memory to which results are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class DecodeInputs:
    """The inputs of a step of n rows with q tokens each. All tokens of a row are together."""

    token_ids: Tensor  # [n * q] int64
    token_rows: Tensor  # [n * q] int64: the row of each token
    positions: Tensor  # [n * q] int64
    next_positions: Tensor  # [n * q] int64: positions + 1, of the tokens to draw
    slots: Tensor  # [n * q] int64: page * page_size + offset
    seq_lens: Tensor  # [n] int32: the lengths with all q tokens
    page_table: Tensor  # [n, `table_width`] int32; only the entries of pages below seq_lens are set
    # Like slots and page_table, for layers whose pages are in the window group. None: there is no such group.
    window_slots: Tensor | None = None
    window_table: Tensor | None = None


@dataclass(slots=True)
class Verdict:
    """What the rows of a step keep."""

    counts: Tensor  # [n] int64: the accepted drafts and the token after them; 0 for padding
    places: Tensor  # [n] int64: the place of the last kept token among the n * q draws


class DecodeKernels(Protocol):
    """The modules `torch_decodes` and `triton_decodes` implement it. A CUDA graph can capture every operation."""

    def begin(
        self,
        row_index: Tensor,
        drafts: Tensor,
        queries: int,
        next_tokens: Tensor,
        length: Tensor,
        page_table: Tensor,
        page_size: int,
        padding: int,
        turn: Tensor,
        turns: int,
        window_table: Tensor | None = None,
        out: DecodeInputs | None = None,
    ) -> DecodeInputs:
        """Gather the inputs of rows, increase their lengths by 1 + drafts, and advance the turn.

        Args:
            row_index: [n] int64. Contains no row twice except `padding`, whose length does not change.
            drafts: [n] int64, the drafts of each row, less than `queries`; 0 for padding.
            queries: Tokens of each row.
            next_tokens: [at least `queries`, rows] int64: the last token of each row, then its drafts.
            length: [rows] int64; every length with its 1 + drafts is at most width * page_size.
            page_table, window_table: [rows, width] int32, contiguous.
            turn: [1] int64, becomes (turn + 1) % turns.
            out: The result of an earlier call with as many rows and queries, which is overwritten and returned.
        """
        ...

    def end(
        self,
        row_index: Tensor,
        drafts: Tensor,
        token_ids: Tensor,
        finite: Tensor,
        next_tokens: Tensor,
        length: Tensor,
        written: Tensor,
        turn: Tensor,
        padding: int,
    ) -> Verdict:
        """Accept each row's drafts up to the first that differs from its draw, and correct lengths and last tokens.

        Args:
            row_index, drafts, next_tokens, length, padding: as for `begin`.
            token_ids: [n * q] int64, the draws of all places.
            finite: [n * q] bool.
            written: [turns, most rows, more than q] int64, may be pinned host memory. Gets the q draws of each row in
                the order of `row_index`. Its last column gets the number of refused drafts, or ~number if a draw that
                the row keeps is not finite. Padding is not written.
            turn: [1] int64, which part of `written` is used.
        """
        ...


def empty_inputs(
    n: int, queries: int, width: int, page_size: int, windowed: bool, device: torch.device
) -> DecodeInputs:
    """Return memory for the inputs of a step. width: the columns of `page_table`."""
    whole = torch.empty((6 if windowed else 5, n * queries), dtype=torch.int64, device=device)
    tables = torch.empty(
        (2 if windowed else 1, n, table_width(width, queries, page_size)), dtype=torch.int32, device=device
    )
    return DecodeInputs(
        token_ids=whole[0],
        token_rows=whole[1],
        positions=whole[2],
        next_positions=whole[3],
        slots=whole[4],
        seq_lens=torch.empty(n, dtype=torch.int32, device=device),
        page_table=tables[0],
        window_slots=whole[5] if windowed else None,
        window_table=tables[1] if windowed else None,
    )


def table_width(width: int, queries: int, page_size: int) -> int:
    """Return the columns of `DecodeInputs.page_table`. Padding may be after a row's last page."""
    return width + -(-(queries - 1) // page_size)
