"""4-bit and 8-bit integers in groups of columns that share a scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from aengine.errors import WeightsError
from aengine.kernels.linear.weights.base import QuantizedWeight, cat_rows, pad_rows, some_rows

# Columns of groups that kernels of 4-bit codes read: multiples of WHOLE, half of WHOLE, and CHUNK.
WHOLE, CHUNK = 128, 32


@dataclass(frozen=True, slots=True)
class IntWeight(QuantizedWeight):
    """Integers in groups of neighbouring columns: (code - zero) * scale."""

    middle: ClassVar[int]  # the zero of codes that name none

    codes: Tensor  # [..., n, k] uint8
    scale: Tensor  # [..., n, k / group] bfloat16, float16 or float32
    zero: Tensor | None = None  # [..., n, k / group] uint8. None: `middle` everywhere.
    # [..., k] int64: column j multiplies x[order[j]]. None: x[j]. All of x is there, some of it maybe several times.
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.codes.shape[-1] // self.scale.shape[-1]

    def dequantize(self) -> Tensor:
        out = self.codes.float()
        groups = out.unflatten(-1, (-1, self.group))  # [..., n, groups, group]
        groups -= self.middle if self.zero is None else self.zero.unsqueeze(-1)
        groups *= self.scale.unsqueeze(-1)
        if self.order is None:
            return out
        inputs = out.shape[-1] if out.is_meta else int(self.order.max()) + 1
        columns = self.order.unsqueeze(-2).expand_as(out)
        return out.new_zeros(*out.shape[:-1], inputs).scatter_add_(-1, columns, out)

    def cat(self, others: Sequence[Self], names: Sequence[str] = ()) -> Self:
        """Raises `WeightsError`, by `names`, if parts order their columns differently. Waits for the device then."""
        for number, other in enumerate(others, 1):
            if not self._is_ordered_as(other):
                raise WeightsError(
                    f"{names[number]} orders its columns differently than {names[0]}; they cannot be one matrix"
                )
        parts, zero = [self, *others], None
        dtypes = {part.scale.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        if any(part.zero is not None for part in parts):
            zero = cat_rows([part._zeros() for part in parts])
        scale = cat_rows([part.scale.to(dtype) for part in parts])
        return replace(self, codes=cat_rows([part.codes for part in parts]), scale=scale, zero=zero)

    def _is_ordered_as(self, other: Self) -> bool:
        if self.order is other.order:
            return True
        if self.order is None or other.order is None:
            return False
        return self.order.is_meta or torch.equal(self.order, other.order)

    def _zeros(self) -> Tensor:
        if self.zero is not None:
            return self.zero
        return torch.full(self.scale.shape, self.middle, dtype=torch.uint8, device=self.codes.device)

    def _rows(self, first: int, end: int) -> Self:
        zero = None if self.zero is None else some_rows(self.zero, first, end)
        return replace(
            self, codes=some_rows(self.codes, first, end), scale=some_rows(self.scale, first, end), zero=zero
        )

    def pad(self, count: int) -> Self:
        zero = None if self.zero is None else pad_rows(self.zero, count)  # a scale of zero makes any code zero
        return replace(self, codes=pad_rows(self.codes, count), scale=pad_rows(self.scale, count), zero=zero)

    def columns(self, first: int, end: int) -> Self:
        """Return these columns alone, of which every group has another number.

        Each group is filled up to whole chunks by columns that give zero, and its scale is repeated for each chunk. The
        number of chunks is rounded up, so that the layers of a model have few shapes. Waits for the device.
        """
        order = self.order
        if order is None:
            order = torch.arange(self.codes.shape[-1], device=self.codes.device)
        chunk, width = min(CHUNK, self.group), end - first
        if order.is_meta:  # without contents, the number of chunks is not known
            count = -(-width // chunk)
            scale = self.scale.new_empty(len(self.scale), count)
            codes = self.codes.new_empty(len(self.codes), count * chunk)
            return type(self)(codes, scale, scale.to(torch.uint8), order.new_empty(count * chunk))
        wanted = (order >= first) & (order < end)
        kept = wanted.nonzero().flatten()  # sorted by their groups, as all columns are
        groups = kept // self.group
        counts = torch.bincount(groups, minlength=self.scale.shape[-1])
        chunks = -(-counts // chunk)  # of each group
        group_of_chunk = torch.arange(len(chunks), device=order.device).repeat_interleave(chunks)
        begin = (chunks.cumsum(0) - chunks) * chunk  # where the columns of each group go
        within = torch.arange(len(kept), device=order.device) - (counts.cumsum(0) - counts)[groups]
        places = begin[groups] + within
        step = max(1, width // chunk // 8)
        more = -len(group_of_chunk) % step  # chunks
        scale = pad(self.scale[:, group_of_chunk], (0, more))
        zero = None if self.zero is None else pad(self.zero[:, group_of_chunk], (0, more), value=self.middle)
        if zero is None:
            codes = self.codes.new_full((len(self.codes), scale.shape[-1] * chunk), self.middle)
        else:
            codes = zero.repeat_interleave(chunk, -1)
        codes[:, places] = self.codes[:, kept]
        sources = order.new_zeros(codes.shape[-1])
        sources[places] = order[kept] - first
        return type(self)(codes, scale, zero, sources)


@dataclass(frozen=True, slots=True)
class Int4Weight(IntWeight):
    """4-bit integers: codes are 0 to 15."""

    middle: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class Int8Weight(IntWeight):
    """8-bit integers: codes are 0 to 255."""

    middle: ClassVar[int] = 128

    @property
    def has_halves(self) -> bool:
        """Whether kernels can read `halves`."""
        return self._shorter_group >= CHUNK

    @property
    def _shorter_group(self) -> int:
        return self.group if not self.group % WHOLE else math.gcd(self.group, WHOLE)

    def halves(self) -> Int4Weight:
        """Return a weight of 4-bit codes with twice the columns, which gives the same products.

        Its first columns have the upper halves of the codes, with scales 16 times as large, and the others the lower
        halves. Both multiply the same inputs.
        """
        k, group, shorter = self.codes.shape[-1], self.group, self._shorter_group
        scale = self.scale.float().repeat_interleave(group // shorter, -1)
        middle = scale.new_full(scale.shape, self.middle, dtype=torch.uint8)
        zero = middle if self.zero is None else self.zero.repeat_interleave(group // shorter, -1)
        order = torch.arange(k, device=self.codes.device) if self.order is None else self.order
        return Int4Weight(
            _beside(self.codes >> 4, self.codes & 15),
            _beside(16 * scale, scale),
            _beside(zero >> 4, zero & 15),
            _beside(order, order),
        )


def _beside(upper: Tensor, lower: Tensor) -> Tensor:
    return torch.cat((upper, lower), -1)
