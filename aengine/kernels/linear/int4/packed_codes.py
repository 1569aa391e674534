"""The layout of 4-bit codes: four in a word of 16 bits.

A block of 128 columns is 32 words. Word c holds columns c, 32 + c, 64 + c and 96 + c, the first in its lowest bits. A
register holds two neighbouring words; shifted and masked, it holds two neighbouring columns of one quarter of a block.
So two instructions unpack a pair of numbers. Codes of 4-bit floats are spread so that at most one shift moves a quarter
into a bfloat16 number: see `spread`.

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

from aengine.kernels.linear.weights.e2m1 import E2m1Weight, Nvfp4Weight
from aengine.kernels.linear.weights.integers import Int4Weight

BLOCK = 128  # columns
QUARTER = 32  # columns: the words of a block, and the smallest group
TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight as the kernels read it. Rows and columns are padded to whole tiles with codes that add nothing."""

    words: Tensor  # [tiles of 16 rows, blocks, 512] int16
    scales: Tensor  # int4: [groups, n] int32, the upper 24 bits of a float32, then a zero of 8 bits.
    # MXFP4: [blocks, n] int32, the exponents of a block's quarters, the first in the lowest bits.
    # NVFP4: [2 * blocks + 1, n] int32, for each block the scales of the first halves of its quarters, then those of the
    # second halves, as in `_scale_bytes`; at the end the rows' factors times 2 ** 10, the bits of a float32.
    order: Tensor | None  # [k] int64: column j multiplies x[order[j]]
    group: int  # columns; blocks * 128 if a row has one scale
    rows: int  # n
    columns: int  # k
    e2m1: bool  # MXFP4, or NVFP4 if `group` is 16

    @property
    def blocks(self) -> int:
        return self.words.shape[1]

    @property
    def nvfp4(self) -> bool:
        return self.e2m1 and self.group == 16


def can_pack(weight: Int4Weight | E2m1Weight) -> bool:
    """Return whether the kernels know groups of this size: of int4 32, 64, whole blocks, or a whole row."""
    if isinstance(weight, E2m1Weight):
        return True
    group = weight.group
    return group in (QUARTER, 2 * QUARTER) or group % BLOCK == 0 or group == weight.shape[-1]


def pack_codes(weight: Int4Weight | E2m1Weight) -> PackedCodes:
    """Return the weight in the layout of the kernels, on its own device. Call it once, after loading.

    Raises: ValueError if it has no kernel.
    """
    n, k = weight.shape
    if not can_pack(weight):
        raise ValueError(f"groups of {weight.group} columns have no kernel: 32, 64, multiples of 128, or a whole row")
    padded = -(-k // BLOCK) * BLOCK
    if isinstance(weight, E2m1Weight):
        codes = weight.codes
        if isinstance(weight, Nvfp4Weight):
            scales = _scale_bytes(weight, padded)
            # Kernels turn a scale of 0 into another number.
            codes.unflatten(-1, (-1, weight.group)).mul_((weight.scale != 0).unsqueeze(-1))
        else:
            scales = _exponents(weight.scale)
        return PackedCodes(_words(codes, padded, spread), scales, None, weight.group, n, k, e2m1=True)
    order = weight.order
    if order is not None and not order.is_meta and torch.equal(order, torch.arange(k, device=order.device)):
        order = None
    group = weight.group if weight.group < k else padded
    scales = _scales_and_zeros(weight.scale, weight.zero, -(-padded // group))
    return PackedCodes(_words(weight.codes, padded, _side_by_side), scales, order, group, n, k, e2m1=False)


def _side_by_side(codes: Tensor) -> Tensor:
    """[..., 4, 32] uint8 -> [..., 32] int16."""
    low = codes[..., 0, :] | codes[..., 1, :] << 4
    high = codes[..., 2, :] | codes[..., 3, :] << 4
    return torch.stack((low, high), dim=-1).view(torch.int16).squeeze(-1)  # little-endian


def spread(codes: Tensor) -> Tensor:
    """Pack codes of 4-bit floats [..., 4, 32] uint8 -> [..., 32] int16.

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


def _scale_bytes(weight: Nvfp4Weight, padded: int) -> Tensor:
    """Return the scales and factors of NVFP4, [2 * blocks + 1, n] int32.

    A byte is a scale without its sign: five bits of an exponent, which is 117 less than a float32's, and three bits of
    mantissa. So no scale is subnormal, and 0 is 0. Kernels multiply by 2 ** -10 times a scale: see `scale_pairs`.
    """
    scale = F.pad(weight.scale.float(), (0, padded // weight.group - weight.scale.shape[1]))
    upper = scale.contiguous().view(torch.int32) >> 20
    each = (upper - (117 << 3)).clamp(min=0).view(len(scale), -1, 4, 2)  # [n, blocks, quarter, half]
    words = each[:, :, 0] | each[:, :, 1] << 8 | each[:, :, 2] << 16 | each[:, :, 3] << 24
    return torch.cat((words.flatten(1).t(), (weight.factor * 2.0**10).view(torch.int32).t())).contiguous()
