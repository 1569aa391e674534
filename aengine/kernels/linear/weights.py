"""Quantised weight matrices in the one form that lies between the formats of checkpoints and the layouts of kernels.

Every weight may have a leading axis of experts. `dequantize` says what the numbers mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

INT4_MIDDLE = 8  # the zero of int4 codes that name none
MXFP4_GROUP = 32  # columns that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the lower three bits; the fourth is the sign

# How inputs are quantised: one scale for each group of 128 columns of a token, one for each token, or one for all.
Activations = Literal["group", "token", "static"]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """8-bit floats, each times the scale of its block; the blocks at the last rows and columns may be cut off."""

    weight: Tensor  # [..., n, k] float8_e4m3fn
    scale: Tensor  # [..., ceil(n / block[0]), ceil(k / block[1])] float32
    block: tuple[int, int]  # rows and columns: (128, 128), (1, k) for each output, (n, k) for the whole, ...
    activations: Activations
    input_scale: Tensor | None = None  # [...] float32, where activations are "static": input = code * input_scale


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """4-bit integers in groups of neighbouring columns: (code - zero) * scale."""

    codes: Tensor  # [..., n, k] uint8, 0 to 15
    scale: Tensor  # [..., n, k / group] bfloat16, float16 or float32
    zero: Tensor | None = None  # [..., n, k / group] uint8; None: 8 everywhere
    # [..., k] int64: column j multiplies x[order[j]]; None: x[j]. All of x is there, some of it maybe several times.
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[..., n, k]."""
        return self.codes.shape

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.codes.shape[-1] // self.scale.shape[-1]


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """4-bit floats (e2m1) in groups of 32 columns, each times a power of two. Codes stay two in a byte: a layer's
    experts are half a gigabyte otherwise, while they are loaded.
    """

    pairs: Tensor  # [..., n, k / 2] uint8, the lower half first
    scale: Tensor  # [..., n, k / 32] uint8: 2 ** (scale - 127)

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor) -> Self:
        """codes [..., n, k] uint8, 0 to 15."""
        return cls(codes[..., 0::2] | codes[..., 1::2] << 4, scale)

    @property
    def codes(self) -> Tensor:
        """[..., n, k] uint8, 0 to 15; bit 3 is the sign."""
        return torch.stack((self.pairs & 15, self.pairs >> 4), -1).flatten(-2)

    @property
    def shape(self) -> torch.Size:
        """[..., n, k]."""
        return torch.Size((*self.pairs.shape[:-1], 2 * self.pairs.shape[-1]))

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return MXFP4_GROUP


QuantizedWeight = Fp8Weight | Int4Weight | Mxfp4Weight


def dequantize(weight: QuantizedWeight) -> Tensor:
    """The matrix that the weight stands for, [..., n, k] float32, its columns in the order of the input."""
    if isinstance(weight, Fp8Weight):
        return _fp8(weight)
    if isinstance(weight, Int4Weight):
        return _int4(weight)
    return _mxfp4(weight)


def _fp8(weight: Fp8Weight) -> Tensor:
    block_n, block_k = weight.block
    out = weight.weight.float()
    n, k = out.shape[-2:]
    rows = weight.scale.repeat_interleave(min(block_n, n), -2)[..., :n, :]  # [..., n, blocks]
    if k % block_k:
        return out * rows.repeat_interleave(min(block_k, k), -1)[..., :k]
    out.unflatten(-1, (-1, block_k)).mul_(rows.unsqueeze(-1))
    return out


def _int4(weight: Int4Weight) -> Tensor:
    out = weight.codes.float()
    groups = out.unflatten(-1, (-1, weight.group))  # [..., n, groups, group]
    groups -= INT4_MIDDLE if weight.zero is None else weight.zero.unsqueeze(-1)
    groups *= weight.scale.unsqueeze(-1)
    if weight.order is None:
        return out
    inputs = out.shape[-1] if out.is_meta else int(weight.order.max()) + 1
    columns = weight.order.unsqueeze(-2).expand_as(out)
    return out.new_zeros(*out.shape[:-1], inputs).scatter_add_(-1, columns, out)


def _mxfp4(weight: Mxfp4Weight) -> Tensor:
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=weight.pairs.device)
    out = values.index_select(0, weight.codes.flatten().int()).view(weight.shape)
    exponent = weight.scale.int()
    # The bits of a float32; 2 ** -127 is a subnormal.
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)
    out.unflatten(-1, (-1, MXFP4_GROUP)).mul_(bits.view(torch.float32).unsqueeze(-1))
    return out
