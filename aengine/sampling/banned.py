"""Bans token sequences per row (bad_words).

The last token of a sequence is masked wherever the row's latest output is all the rest of it. Under lookahead the
host does not know the latest token when it launches a step, so the comparison is the device's: each row with such
sequences remembers there what it drew last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aengine.sampling.upload import upload
from aengine.step_plan import NewRow

_ANY = -1  # in a sequence: before its beginning, so that anything matches
_NONE = -2  # in what a row drew: before its beginning, so that no token matches
_FREE = -1  # as a last token: no sequence here


class BannedSequences:
    """Per row: sequences, as many and as long as the largest entry so far, and as many of the newest output tokens.

    Allocated when the first row needs it. Rows without sequences are never looked at.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        # All int32: rests [rows, sequences, width], right-aligned; lasts [rows, sequences]; recent [rows, width].
        self._rests = torch.empty((max_rows, 0, 0), dtype=torch.int32, device=device)
        self._lasts = torch.empty((max_rows, 0), dtype=torch.int32, device=device)
        self._recent = torch.empty((max_rows, 0), dtype=torch.int32, device=device)

    def set_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Replace the sequences of these rows, and what they drew by the output known so far."""
        if not new_rows:
            return
        self._widen(
            max(len(new.banned) for new in new_rows),
            max(len(sequence) for new in new_rows for sequence in new.banned) - 1,
        )
        count, width = self._rests.shape[1:]
        rests = np.full((len(new_rows), count, width), _ANY, dtype=np.int32)
        lasts = np.full((len(new_rows), count), _FREE, dtype=np.int32)
        recent = np.full((len(new_rows), width), _NONE, dtype=np.int32)
        for i, new in enumerate(new_rows):
            for j, (*rest, last) in enumerate(new.banned):
                rests[i, j, width - len(rest) :] = rest
                lasts[i, j] = last
            output = new.tokens[max(new.prompt_len, len(new.tokens) - width) :]
            recent[i, width - len(output) :] = output
        rows = upload(np.array([new.row for new in new_rows], dtype=np.int64), self._device)
        self._rests.index_copy_(0, rows, upload(rests, self._device))
        self._lasts.index_copy_(0, rows, upload(lasts, self._device))
        self._recent.index_copy_(0, rows, upload(recent, self._device))

    def copy_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Give rows[i] what sources[i] has, both [n] int64."""
        for table in (self._rests, self._lasts, self._recent):
            table.index_copy_(0, rows, table.index_select(0, sources))

    def mask(self, logits: Tensor, draws: Tensor, rows: Tensor) -> None:
        """Set to -inf, in place, the logits that would complete a banned sequence of rows[i] in logits[draws[i]].

        logits [all draws, vocab] float32, contiguous; draws and rows [n] int64.
        """
        rests, lasts = self._rests.index_select(0, rows), self._lasts.index_select(0, rows)
        recent = self._recent.index_select(0, rows)[:, None, :]
        completed = ((rests == recent) | (rests == _ANY)).all(dim=-1) & (lasts != _FREE)  # [n, sequences]
        values = torch.zeros_like(lasts, dtype=torch.float32).masked_fill_(completed, -torch.inf)
        cells = draws[:, None] * logits.shape[1] + lasts.clamp(min=0)
        logits.view(-1).index_add_(0, cells.view(-1), values.view(-1))

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Remember one more output token for each of these rows, both [n] int64."""
        if self._recent.shape[1]:
            older = self._recent.index_select(0, rows)[:, 1:]
            self._recent.index_copy_(0, rows, torch.cat((older, token_ids[:, None].int()), dim=1))

    def _widen(self, count: int, width: int) -> None:
        """Grow the tables to that many sequences of so many tokens before the last, doubling, so that it seldom
        happens.
        """
        more, longer = count - self._rests.shape[1], width - self._rests.shape[2]
        if more > 0 or longer > 0:
            more = max(more, self._rests.shape[1]) if more > 0 else 0
            longer = max(longer, self._rests.shape[2]) if longer > 0 else 0
            pad = torch.nn.functional.pad
            self._rests = pad(self._rests, (longer, 0, 0, more), value=_ANY)
            self._lasts = pad(self._lasts, (0, more), value=_FREE)
            self._recent = pad(self._recent, (longer, 0), value=_NONE)
