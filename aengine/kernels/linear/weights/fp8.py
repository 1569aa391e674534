"""8-bit floats in blocks that share a scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Self

import torch
from torch import Tensor

from aengine.kernels.linear.weights.base import QuantizedWeight, cat_rows, pad_rows, some_rows

# How inputs are quantised: one scale for each group of 128 columns of a token, one for each token, or one for all.
Activations = Literal["group", "token", "static"]


@dataclass(frozen=True, slots=True)
class Fp8Weight(QuantizedWeight):
    """8-bit floats, each times the scale of its block. The last blocks of rows and columns may be cut off."""

    weight: Tensor  # [..., n, k] float8_e4m3fn
    scale: Tensor  # [..., ceil(n / block[0]), ceil(k / block[1])] float32
    block: tuple[int, int]  # rows and columns: (128, 128), (1, k) for each output, (n, k) for the whole, ...
    activations: Activations
    input_scale: Tensor | None = None  # [...] float32, where activations are "static": input = code * input_scale

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def dequantize(self) -> Tensor:
        block_n, block_k = self.block
        out = self.weight.float()
        n, k = out.shape[-2:]
        rows = self.scale.repeat_interleave(min(block_n, n), -2)[..., :n, :]  # [..., n, blocks]
        if k % block_k:
            return out * rows.repeat_interleave(min(block_k, k), -1)[..., :k]
        out.unflatten(-1, (-1, block_k)).mul_(rows.unsqueeze(-1))
        return out

    def cat(self, others: Sequence[Self], names: Sequence[str] = ()) -> Self:
        """If rows of a part are no multiple of its blocks, all blocks become shorter. If each part has one scale, every
        row gets a scale. Static scales of inputs become their maximum, so that no part cuts inputs off. They are equal
        anyway if they were calibrated on the same inputs.
        """
        if not others:
            return self
        parts, input_scale = [self, *others], self.input_scale
        if input_scale is not None:
            scales = [part.input_scale for part in parts if part.input_scale is not None]
            input_scale = torch.stack(scales).amax(0)
        height = self._common_height(others)
        return replace(
            self,
            weight=cat_rows([part.weight for part in parts]),
            scale=cat_rows([part._finer_scale(height) for part in parts]),
            block=(height, self.block[1]),
            input_scale=input_scale,
        )

    def _common_height(self, others: Sequence[Self]) -> int:
        """Return how many rows a block has that tiles each part from its first row on."""
        parts = [self, *others]
        if all(part.scale.shape[-2:] == (1, 1) for part in parts) and self.block[1] == self.weight.shape[-1]:
            return 1
        ends = accumulate(part.weight.shape[-2] for part in parts[:-1])
        return math.gcd(*(part.block[0] for part in parts), *ends)

    def _finer_scale(self, height: int) -> Tensor:
        """Return the scales of blocks of so many rows, which divide its own."""
        if height == self.block[0]:
            return self.scale
        count = -(-self.weight.shape[-2] // height)
        return self.scale.repeat_interleave(self.block[0] // height, -2)[..., :count, :]

    def _rows(self, first: int, end: int) -> Self:
        scale, height = self.scale, self.block[0]
        if height >= self.weight.shape[-2]:
            height = end - first
        else:  # if the range cuts through blocks, all become shorter
            finer = math.gcd(height, first)
            scale = some_rows(scale.repeat_interleave(height // finer, -2), first // finer, -(-end // finer))
            height = finer
        return replace(self, weight=some_rows(self.weight, first, end), scale=scale, block=(height, self.block[1]))

    def pad(self, count: int) -> Self:
        n, scale, height = self.weight.shape[-2], self.scale, self.block[0]
        if height >= n:
            height = max(height, n + count)
        else:
            scale = pad_rows(scale, -(-(n + count) // height) - scale.shape[-2])
        return replace(self, weight=pad_rows(self.weight, count), scale=scale, block=(height, self.block[1]))
