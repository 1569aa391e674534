"""What every quantised weight can do, and the same for the tensors that it consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor


class QuantizedWeight(ABC):
    """A quantised matrix [..., n, k], n outputs by k inputs. All of its tensors may have a leading axis of experts.

    No operation changes the numbers that it stands for.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """[..., n, k]."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the matrix that it stands for, [..., n, k] float32, with its columns in the order of the input."""

    @abstractmethod
    def cat(self, others: Sequence[Self], names: Sequence[str] = ()) -> Self:
        """Return one weight: the rows of this one, and below them those of the others.

        names: of this one and the others, for errors. Raises `WeightsError` if they cannot be one weight.
        """

    def rows(self, ranges: Sequence[tuple[int, int]]) -> Self:
        """Return the rows of each range (first, end), one range below the other."""
        first, *others = (self._rows(*one) for one in ranges)
        return first.cat(others)

    @abstractmethod
    def _rows(self, first: int, end: int) -> Self:
        """Return the rows of one range."""

    @abstractmethod
    def pad(self, count: int) -> Self:
        """Return it with `count` more rows, which stand for zeros."""

    def columns(self, first: int, end: int) -> Self:
        """Return these columns alone.

        Needed only for a format whose groups of columns are scattered. All others are cut while they are read.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be cut between columns")

    def even_rows_first(self) -> Self:
        """Return it with rows 0, 2, 4, ... above rows 1, 3, 5, ...

        Needed only for a format whose experts have rows of gate and up by turns.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be reordered by rows")


def cat_rows(tensors: Sequence[Tensor]) -> Tensor:
    """[..., n_i, k] of each -> [..., sum of n_i, k]."""
    return torch.cat(list(tensors), -2) if len(tensors) > 1 else tensors[0]


def some_rows(tensor: Tensor, first: int, end: int) -> Tensor:
    return tensor[..., first:end, :].contiguous()


def pad_rows(tensor: Tensor, count: int) -> Tensor:
    """[..., n, k] -> [..., n + count, k], with zeros below."""
    *lead, n, k = tensor.shape
    padded = tensor.new_zeros(*lead, n + count, k)  # torch's own pad does not take 8-bit floats
    padded[..., :n, :] = tensor
    return padded
