"""The layout of 4-bit codes: four in a word of 16 bits.

A block of 128 columns is 32 words. Word c holds columns c, 32 + c, 64 + c and 96 + c, the first in its lowest bits. A
register holds two neighbouring words; shifted and masked, it holds two neighbouring columns of one quarter of a block.
So two instructions unpack a pair of numbers. Codes of MXFP4 are spread so that at most one shift moves a quarter into a
bfloat16 number: see `spread`.

A strip of 16 rows and a block of columns is 1 KB of contiguous memory, and the strips follow one another. Words of a
strip are in the order in which the threads of a warp hold the left operand of a matrix product: 16 bytes a thread for
each half of a quarter. So no word moves between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.weights.int4 import Int4Weight
from aengine.kernels.linear.weights.mxfp4 import Mxfp4Weight

BLOCK = 128  # columns
QUARTER = 32  # columns: the words of a block, and the smallest group
TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight as the kernels read it. Rows and columns are padded to whole tiles with codes that add nothing."""

    words: Tensor  # [tiles of 16 rows, blocks, 512] int16
    scales: Tensor  # int4: [groups, n] int32, the upper 24 bits of a float32, then a zero of 8 bits.
    # mxfp4: [blocks, n] int32, the exponents of a block's quarters, the first in the lowest bits
    order: Tensor | None  # [k] int64: column j multiplies x[order[j]]
    group: int  # columns; blocks * 128 if a row has one scale
    rows: int  # n
    columns: int  # k
    mxfp4: bool

    @property
    def blocks(self) -> int:
        return self.words.shape[1]


def supported_group(group: int, columns: int) -> bool:
    """Return whether the kernels know groups of this size: 32, 64, whole blocks, or a whole row."""
    return group in (QUARTER, 2 * QUARTER) or group % BLOCK == 0 or group == columns


def pack_codes(weight: Int4Weight | Mxfp4Weight) -> PackedCodes:
    """Return the weight in the layout of the kernels, on its own device. Call it once, after loading.

    Raises: ValueError for groups that are not `supported_group`.
    """
    n, k = weight.shape
    if not supported_group(weight.group, k):
        raise ValueError(f"groups of {weight.group} columns have no kernel: 32, 64, multiples of 128, or a whole row")
    padded = -(-k // BLOCK) * BLOCK
    if isinstance(weight, Mxfp4Weight):
        return PackedCodes(
            _words(weight.codes, padded, spread), _exponents(weight.scale), None, weight.group, n, k, mxfp4=True
        )
    order = weight.order
    if order is not None and not order.is_meta and torch.equal(order, torch.arange(k, device=order.device)):
        order = None
    group = weight.group if weight.group < k else padded
    scales = _scales_and_zeros(weight.scale, weight.zero, -(-padded // group))
    return PackedCodes(_words(weight.codes, padded, _side_by_side), scales, order, group, n, k, mxfp4=False)


def _side_by_side(codes: Tensor) -> Tensor:
    """[..., 4, 32] uint8 -> [..., 32] int16."""
    low = codes[..., 0, :] | codes[..., 1, :] << 4
    high = codes[..., 2, :] | codes[..., 3, :] << 4
    return torch.stack((low, high), dim=-1).view(torch.int16).squeeze(-1)  # little-endian


def spread(codes: Tensor) -> Tensor:
    """Pack MXFP4 codes [..., 4, 32] uint8 -> [..., 32] int16.

    A bfloat16 number takes the magnitude of a code at bits 6 to 8 and its sign at bit 15. Here the first quarter is six
    bits lower, the second three bits lower, the third in place. The last one has the remaining bits.
    """
    first, second, third, last = codes.short().unbind(-2)
    words = (first & 7) | (first & 8) << 6 | (second & 7) << 3 | (second & 8) << 9
    words |= (third & 7) << 6 | (third & 8) << 12
    return words | (last & 1) << 13 | (last & 6) << 9 | (last & 8) << 11


def _words(codes: Tensor, padded: int, in_words: Callable[[Tensor], Tensor]) -> Tensor:
    """[n, k] -> [tiles, blocks, 512] int16; in_words: [..., 4, 32] uint8 -> [..., 32] int16."""
    n, k = codes.shape
    if padded > k or n % TILE_ROWS:
        codes = F.pad(codes, (0, padded - k, 0, -n % TILE_ROWS))
    words = in_words(codes.view(len(codes), -1, 4, QUARTER))  # [n, blocks, 32]
    # Thread 4 * r + t of a warp holds rows r and 8 + r of 16, and words 2 * t, 2 * t + 1, 8 + 2 * t and 9 + 2 * t of
    # 16.
    tiles = words.view(-1, 2, 8, words.shape[1], 2, 2, 4, 2)  # [tiles, eight, r, blocks, half, eight, t, pair]
    return tiles.permute(0, 3, 4, 2, 6, 1, 5, 7).reshape(len(tiles), -1, TILE_ROWS * QUARTER)


def _scales_and_zeros(scale: Tensor, zero: Tensor | None, groups: int) -> Tensor:
    """Return [groups, n] int32 from two tensors [n, given]. Scales of 16 bits stay exact; others keep 16 bits of
    mantissa.
    """
    bits = scale.t().float().contiguous().view(torch.int32)
    bits = (bits + 0x80) & ~0xFF
    bits |= 8 if zero is None else zero.t().int()
    return F.pad(bits, (0, 0, 0, groups - len(bits)))


def _exponents(scale: Tensor) -> Tensor:
    """[n, quarters] uint8 -> [blocks, n] int32."""
    whole = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return whole.view(torch.int32).t().contiguous()
