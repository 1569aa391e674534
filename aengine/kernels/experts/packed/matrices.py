"""One matrix of 4-bit codes for each expert, as the kernels read it: all matrices stacked and packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.linear.int4.packed_codes import BLOCK, TILE_ROWS, can_pack, pack_codes
from aengine.kernels.linear.weights.e2m1 import E2m1Weight, Mxfp4Weight
from aengine.kernels.linear.weights.integers import Int4Weight


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """The matrices of all experts in the layout of `pack_codes`.

    An expert has one part, or two: gate and up. Each part's rows are padded to a multiple of 16.
    """

    words: Tensor  # [E * parts * strips, blocks, 512] int16
    scales: Tensor  # int32 [any, E * parts * strips * 16], as in `PackedCodes`
    group: int
    e2m1: bool  # MXFP4, or NVFP4 if `group` is 16
    bare: bool  # of MXFP4: whether 2 ** 126 times the largest scale fits bfloat16
    rows: int  # of a part
    columns: int

    @property
    def nvfp4(self) -> bool:
        return self.e2m1 and self.group == 16

    @staticmethod
    def fits(weight: Int4Weight | E2m1Weight) -> bool:
        """Return whether the kernels can read it: columns in their order, in supported groups."""
        in_order = isinstance(weight, E2m1Weight) or weight.order is None
        return in_order and can_pack(weight)

    @classmethod
    def from_weight(cls, weight: Int4Weight | E2m1Weight, parts: int = 1) -> PackedMatrices:
        """Pack one part at a time, so that no second copy of all codes is made. Raises: ValueError if not `fits`."""
        if not cls.fits(weight):
            raise ValueError(f"4-bit weights {list(weight.shape)} have no kernel; use them dequantised")
        (experts, n, k), device = weight.shape, weight.scale.device
        n //= parts
        strips, blocks, count = -(-n // TILE_ROWS), -(-k // BLOCK), experts * parts
        words = torch.empty(count, strips, blocks, TILE_ROWS * BLOCK // 4, dtype=torch.int16, device=device)
        scales = None
        for number in range(count):
            rows = slice(number % parts * n, (number % parts + 1) * n)
            at = number // parts, rows
            if isinstance(weight, E2m1Weight):
                one = pack_codes(weight.part(at))
            else:
                one = pack_codes(
                    Int4Weight(weight.codes[at], weight.scale[at], None if weight.zero is None else weight.zero[at])
                )
            words[number] = one.words
            if scales is None:
                scales = one.scales.new_zeros(len(one.scales), count, strips * TILE_ROWS)
            scales[:, number, :n] = one.scales
            group = one.group
        if scales is None:
            raise ValueError("there are no experts")
        bare = isinstance(weight, Mxfp4Weight) and (device.type == "meta" or int(weight.scale.max()) <= 128)
        return cls(words.flatten(0, 1), scales.flatten(1), group, isinstance(weight, E2m1Weight), bare, n, k)

    @property
    def constants(self) -> dict[str, int | bool]:
        """Return the kernels' compile-time constants of the codes."""
        return {
            "BLOCKS": self.words.shape[1], "STRIPS": -(-self.rows // TILE_ROWS), "ALL_ROWS": self.scales.shape[1],
            "GROUP": self.group, "E2M1": self.e2m1,
        }  # fmt: skip
