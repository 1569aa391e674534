"""Four codes in a word of 16 bits, so that pairs of words unpack into pairs of numbers in two instructions.

A block of 128 columns is 32 words: word c holds columns c, 32 + c, 64 + c and 96 + c, the first in its lowest bits.
A register of two neighbouring words, shifted and masked, is two neighbouring columns of one quarter of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.weights import Int4Weight, Mxfp4Weight

BLOCK = 128  # columns
QUARTER = 32  # columns: the words of a block; the smallest group


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight as the kernels read it. Columns are padded to whole blocks by codes that multiply nothing."""

    words: Tensor  # [n, blocks * 32] int16
    scales: Tensor  # int4: [groups, n] int32, the upper 24 bits of a float32, and a zero below them;
    #                 mxfp4: [blocks, n] int32, the exponents of a block's quarters, the first in the lowest bits
    order: Tensor | None  # [k] int64: column j multiplies x[order[j]]
    group: int  # columns; blocks * 128 where a row has one scale
    columns: int  # k
    mxfp4: bool

    @property
    def rows(self) -> int:
        return len(self.words)

    @property
    def blocks(self) -> int:
        return self.words.shape[1] // QUARTER


def supported_group(group: int, columns: int) -> bool:
    """Whether the kernels know groups of so many columns: 32, 64, whole blocks, or a whole row."""
    return group in (QUARTER, 2 * QUARTER) or group % BLOCK == 0 or group == columns


def pack_codes(weight: Int4Weight | Mxfp4Weight) -> PackedCodes:
    """The weight in the layout of the kernels, on its own device; once, after loading.

    Raises ValueError for groups that are not `supported_group`.
    """
    k = weight.codes.shape[1]
    if not supported_group(weight.group, k):
        raise ValueError(f"groups of {weight.group} columns have no kernel: 32, 64, multiples of 128, or a whole row")
    padded = -(-k // BLOCK) * BLOCK
    if isinstance(weight, Mxfp4Weight):
        return PackedCodes(_words(weight.codes, padded), _exponents(weight.scale), None, weight.group, k, mxfp4=True)
    order = weight.order
    if order is not None and not order.is_meta and torch.equal(order, torch.arange(k, device=order.device)):
        order = None
    group = weight.group if weight.group < k else padded
    scales = _scales_and_zeros(weight.scale, weight.zero, -(-padded // group))
    return PackedCodes(_words(weight.codes, padded), scales, order, group, k, mxfp4=False)


def _words(codes: Tensor, padded: int) -> Tensor:
    """[n, k] -> [n, padded / 4] int16."""
    n, k = codes.shape
    if padded > k:
        codes = F.pad(codes, (0, padded - k))
    quarters = codes.view(n, -1, 4, QUARTER)  # [n, blocks, 4, 32]
    low = quarters[:, :, 0] | quarters[:, :, 1] << 4  # [n, blocks, 32]
    high = quarters[:, :, 2] | quarters[:, :, 3] << 4
    return torch.stack((low, high), dim=-1).view(torch.int16).view(n, -1)  # little-endian


def _scales_and_zeros(scale: Tensor, zero: Tensor | None, groups: int) -> Tensor:
    """Two tensors [n, given] -> [groups, n] int32. Scales of 16 bits stay exact, others keep 16 bits of mantissa."""
    bits = scale.t().float().contiguous().view(torch.int32)
    bits = (bits + 0x80) & ~0xFF
    bits |= 8 if zero is None else zero.t().int()
    return F.pad(bits, (0, 0, 0, groups - len(bits)))


def _exponents(scale: Tensor) -> Tensor:
    """[n, quarters] uint8 -> [blocks, n] int32."""
    whole = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return whole.view(torch.int32).t().contiguous()
