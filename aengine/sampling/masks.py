"""Stages that add to logits or mask them: logit_bias, min_tokens, bad_words, allowed_token_ids, grammars.

Each class keeps tables on the device for the rows that need them, and grows the tables when a row needs more columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.sampling.upload import upload
from aengine.step_plan import NewRow

_ANY = -1  # pads a banned sequence at its start; matches any token
_NONE = -2  # pads a row's output at its start; matches no token
_FREE = -1  # instead of the last token of a sequence: the entry is unused


class TokenTable:
    """Offsets for the logits of a few tokens per row, for logit_bias and min_tokens.

    The table has ids [rows, width] int64 and values [rows, width] float32. The width is at least that of the longest
    entry so far. Shorter entries are padded with id 0 and value 0, which changes nothing.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ids = torch.zeros((max_rows, 0), dtype=torch.int64, device=device)
        self._values = torch.zeros((max_rows, 0), dtype=torch.float32, device=device)

    def set_rows(self, entries: Iterable[tuple[int, Mapping[int, float]]]) -> None:
        """Replace the entries of the given rows: (row, {token id: value}). Ids outside the vocabulary are dropped."""
        kept = [
            (row, {token_id: value for token_id, value in entry.items() if 0 <= token_id < self._vocab_size})
            for row, entry in entries
        ]
        if not kept:
            return
        self._widen(max(len(entry) for _, entry in kept))
        ids = np.zeros((len(kept), self._ids.shape[1]), dtype=np.int64)
        values = np.zeros(ids.shape, dtype=np.float32)
        for i, (_, entry) in enumerate(kept):
            ids[i, : len(entry)] = list(entry.keys())
            values[i, : len(entry)] = list(entry.values())
        rows = upload(np.array([row for row, _ in kept], dtype=np.int64), self._device)
        self._ids.index_copy_(0, rows, upload(ids, self._device))
        self._values.index_copy_(0, rows, upload(values, self._device))

    def copy_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Copy the entries of sources to rows, both [n] int64."""
        for table in (self._ids, self._values):
            table.index_copy_(0, rows, table.index_select(0, sources))

    def add_to(self, logits: Tensor, draws: Tensor, rows: Tensor, where: Tensor | None = None) -> None:
        """Add the values of rows[i] to logits[draws[i]] in place.

        logits: [all draws, vocab], contiguous. draws, rows: [n] int64. where: [n, 1] bool, the rows to change. None:
        all.
        """
        values = self._values.index_select(0, rows)
        if where is not None:
            values.masked_fill_(~where, 0.0)
        cells = draws[:, None] * logits.shape[1] + self._ids.index_select(0, rows)
        logits.view(-1).index_add_(0, cells.view(-1), values.view(-1))

    def _widen(self, width: int) -> None:
        """Grow the table for entries of `width` tokens. Its width at least doubles, so that growing is rare."""
        missing = width - self._ids.shape[1]
        if missing > 0:
            missing = max(missing, self._ids.shape[1])
            self._ids = torch.nn.functional.pad(self._ids, (0, missing))
            self._values = torch.nn.functional.pad(self._values, (0, missing))


class BannedSequences:
    """Bans token sequences per row (bad_words).

    The last token of a sequence is masked if the row's latest output equals the rest of the sequence. With lookahead
    the host does not know the latest token when it launches a step. So the device keeps each row's newest output tokens
    and compares. The tables are as large as the most and the longest sequences
    so far require. Only rows with sequences are read.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        # [rows, sequences, width], right-aligned: each sequence without its last token
        self._rests = torch.empty((max_rows, 0, 0), dtype=torch.int32, device=device)
        self._lasts = torch.empty((max_rows, 0), dtype=torch.int32, device=device)  # [rows, sequences]: last tokens
        # [rows, width], right-aligned: the newest output tokens
        self._recent = torch.empty((max_rows, 0), dtype=torch.int32, device=device)

    def set_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Replace the sequences and the newest output tokens of the given rows."""
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
        """Copy the entries of sources to rows, both [n] int64."""
        for table in (self._rests, self._lasts, self._recent):
            table.index_copy_(0, rows, table.index_select(0, sources))

    def mask(self, logits: Tensor, draws: Tensor, rows: Tensor) -> None:
        """Mask in place, in logits[draws[i]], the tokens that would complete a banned sequence of rows[i].

        logits: [all draws, vocab] float32, contiguous. draws, rows: [n] int64.
        """
        rests, lasts = self._rests.index_select(0, rows), self._lasts.index_select(0, rows)
        recent = self._recent.index_select(0, rows)[:, None, :]
        completed = ((rests == recent) | (rests == _ANY)).all(dim=-1) & (lasts != _FREE)  # [n, sequences]
        values = torch.zeros_like(lasts, dtype=torch.float32).masked_fill_(completed, -torch.inf)
        cells = draws[:, None] * logits.shape[1] + lasts.clamp(min=0)
        logits.view(-1).index_add_(0, cells.view(-1), values.view(-1))

    def add(self, rows: Tensor, token_ids: Tensor, counted: Tensor | None = None) -> None:
        """Append one output token to each given row, both [n] int64. counted: [n] bool, to which; None: to all."""
        if self._recent.shape[1]:
            before = self._recent.index_select(0, rows)
            after = torch.cat((before[:, 1:], token_ids[:, None].int()), dim=1)
            if counted is not None:
                after = torch.where(counted[:, None], after, before)
            self._recent.index_copy_(0, rows, after)

    def _widen(self, count: int, width: int) -> None:
        """Grow the tables for `count` sequences of `width` tokens without the last. Sizes at least double."""
        more, longer = count - self._rests.shape[1], width - self._rests.shape[2]
        if more > 0 or longer > 0:
            more = max(more, self._rests.shape[1]) if more > 0 else 0
            longer = max(longer, self._rests.shape[2]) if longer > 0 else 0
            pad = torch.nn.functional.pad
            self._rests = pad(self._rests, (longer, 0, 0, more), value=_ANY)
            self._lasts = pad(self._lasts, (0, more), value=_FREE)
            self._recent = pad(self._recent, (longer, 0), value=_NONE)


def allow_only(logits: Tensor, bits: Tensor) -> Tensor:
    """Return logits with -inf for every token whose bit is 0, [rows, vocab] float32, a new tensor.

    bits: [rows, ceil(vocab / 32)] int32; token i is bit i % 32 of word i // 32. If other masks have already set all
    allowed tokens to -inf, the allowed tokens get logit 0, so that the row can continue.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    # Unpack bytes, so that the largest temporary has one byte per token. Hosts and devices are little-endian.
    spread = bits.view(torch.uint8)[:, :, None].bitwise_right_shift(shifts).bitwise_and_(1)
    forbidden = spread.view(len(bits), -1)[:, : logits.shape[1]] == 0
    masked = logits.masked_fill(forbidden, -torch.inf)
    lost = masked.amax(dim=-1, keepdim=True) == -torch.inf
    return masked.masked_fill_(~forbidden & lost, 0.0)


class AllowedTokens:
    """Masks of the rows with `allowed_token_ids`, [rows, ceil(vocab / 32)] int32 on the device.

    Allocated when the first row needs it. Only rows with such a list are read.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, -(-vocab_size // 32))
        self._device = device
        self._bits: Tensor | None = None

    def set_rows(self, entries: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Replace the masks of the given rows: (row, ids)."""
        listed = list(entries)
        if not listed:
            return
        if self._bits is None:
            self._bits = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        masks = upload(np.stack([self._pack(ids) for _, ids in listed]), self._device)
        rows = upload(np.array([row for row, _ in listed], dtype=np.int64), self._device)
        self._bits.index_copy_(0, rows, masks)

    def copy_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Copy the entries of sources to rows, both [n] int64."""
        if self._bits is not None:
            self._bits.index_copy_(0, rows, self._bits.index_select(0, sources))

    def pick(self, rows: Tensor) -> Tensor:
        """Return the masks [n, words] int32 of rows [n] int64, which must have one."""
        if self._bits is None:
            raise RuntimeError("no row has a mask")
        return self._bits.index_select(0, rows)

    def _pack(self, ids: Sequence[int]) -> NDArray[np.int32]:
        flags = np.zeros(self._shape[1] * 32, dtype=np.bool_)
        flags[np.array(ids, dtype=np.int64)] = True
        return np.packbits(flags, bitorder="little").view(np.int32)
