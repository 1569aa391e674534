"""Masks of allowed tokens, as bits, put on logits."""

from __future__ import annotations

import torch
from torch import Tensor


def allow_only(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits with -inf for every token whose bit is 0, [rows, vocab] float32, a new tensor.

    bits [rows, ceil(vocab / 32)] int32: token i is bit i % 32 of word i // 32. Where all allowed tokens are at -inf
    already, by what else masks them, they become equally likely instead: a grammar leaves no other way on.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    # Byte by byte, so that the largest temporary has a byte per token; hosts and devices are little-endian.
    spread = bits.view(torch.uint8)[:, :, None].bitwise_right_shift(shifts).bitwise_and_(1)
    forbidden = spread.view(len(bits), -1)[:, : logits.shape[1]] == 0
    masked = logits.masked_fill(forbidden, -torch.inf)
    lost = masked.amax(dim=-1, keepdim=True) == -torch.inf
    return masked.masked_fill_(~forbidden & lost, 0.0)
