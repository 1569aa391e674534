"""Masks of allowed tokens as bits: applied to logits, and kept for each row that has `allowed_token_ids`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.sampling.upload import upload


def allow_only(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits with -inf for every token whose bit is 0, [rows, vocab] float32, a new tensor.

    bits [rows, ceil(vocab / 32)] int32: token i is bit i % 32 of word i // 32. Where all allowed tokens are at -inf
    already, by what else masks them, they become equally likely instead: there is no other way on.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    # Byte by byte, so that the largest temporary has a byte per token; hosts and devices are little-endian.
    spread = bits.view(torch.uint8)[:, :, None].bitwise_right_shift(shifts).bitwise_and_(1)
    forbidden = spread.view(len(bits), -1)[:, : logits.shape[1]] == 0
    masked = logits.masked_fill(forbidden, -torch.inf)
    lost = masked.amax(dim=-1, keepdim=True) == -torch.inf
    return masked.masked_fill_(~forbidden & lost, 0.0)


class AllowedTokens:
    """A mask for each row that has `allowed_token_ids`, [rows, ceil(vocab / 32)] int32 on the device.

    Allocated when the first row needs it. Rows without such a list are never looked at.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, -(-vocab_size // 32))
        self._device = device
        self._bits: Tensor | None = None

    def set_rows(self, entries: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Replace the masks of these rows: (row, ids)."""
        listed = list(entries)
        if not listed:
            return
        if self._bits is None:
            self._bits = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        masks = upload(np.stack([self._pack(ids) for _, ids in listed]), self._device)
        rows = upload(np.array([row for row, _ in listed], dtype=np.int64), self._device)
        self._bits.index_copy_(0, rows, masks)

    def copy_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Give rows[i] what sources[i] has, both [n] int64."""
        if self._bits is not None:
            self._bits.index_copy_(0, rows, self._bits.index_select(0, sources))

    def pick(self, rows: Tensor) -> Tensor:
        """The masks of rows [n] int64 that have one, [n, words] int32."""
        if self._bits is None:
            raise RuntimeError("no row has a mask")
        return self._bits.index_select(0, rows)

    def _pack(self, ids: Sequence[int]) -> NDArray[np.int32]:
        flags = np.zeros(self._shape[1] * 32, dtype=np.bool_)
        flags[np.array(ids, dtype=np.int64)] = True
        return np.packbits(flags, bitorder="little").view(np.int32)
