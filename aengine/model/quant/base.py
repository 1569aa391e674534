"""What the loader asks of the format that a weight matrix is stored in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError, WeightsError
from aengine.kernels.linear.weights import QuantizedWeight
from aengine.model.fields import Fields

SCALES = ("BF16", "F16", "F32")  # dtypes of scales, as safetensors spells them
INTEGERS = ("I32", "I64")


@dataclass(frozen=True, slots=True)
class Along:
    """The axis of a tensor that runs along its matrix's outputs, or along its inputs."""

    axis: int
    each: int = 1  # outputs, or inputs, to an element

    @classmethod
    def scales(cls, axis: int, each: int, total: int) -> Along | None:
        """Of scales, one for each so many of all; None: one for all."""
        return cls(axis, each) if each < total else None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint that a matrix is made from."""

    key: str  # what `unpack` calls it
    name: str  # what the checkpoint calls it
    shape: tuple[int, ...]  # of the place that it is read into
    dtypes: tuple[str, ...]  # any of these, as safetensors spells them
    spellings: tuple[tuple[int, ...], ...] = ()  # other shapes, of as many elements, that files give it
    optional: bool = False
    outputs: Along | None = None  # None: every part of the matrix needs all of it
    inputs: Along | None = None
    scatters: bool = False  # it says which columns are a group, so that their part is not known before it is read

    def check(self, dtype: str, shape: Sequence[int]) -> None:
        """Raise `WeightsError` unless this is what the header of a file may say of it."""
        if tuple(shape) not in (self.shape, *self.spellings):
            raise WeightsError(f"{self.name} has shape {list(shape)}, config.json makes it {list(self.shape)}")
        if dtype not in self.dtypes:
            raise WeightsError(f"{self.name} is {dtype}, its format has {' or '.join(self.dtypes)}")


class LinearFormat(Protocol):
    """A format that weight matrices are stored in, with its parameters; equal ones can be fused."""

    @property
    def name(self) -> str:
        """For messages and logs."""
        ...

    @property
    def bits(self) -> int:
        """About how many a weight takes, with its share of the scales."""
        ...

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        """The tensors that the checkpoint holds for the matrix `prefix` [outputs, inputs].

        `experts`: so many matrices are fused in tensors of three axes; `prefix` is then what the checkpoint calls
        them together. Raises `UnsupportedModelError` where the format does not have that, or not that shape.
        """
        ...

    def unpack(
        self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """The matrix, from its tensors by their keys, on whatever device they are; it may go on using them.

        outputs, inputs: of the whole matrix. Where the tensors are cut, as `StoredTensor` says that they can be, it is
        that part of it.
        Tensors may have a leading axis of experts, be it that they are fused or that the places of experts stored one
        by one were allocated together; `prefixes` are for messages, one an expert in the second case.
        Raises `WeightsError`, naming the tensor, for values that no such tensor has.
        """
        ...


def check_range(tensor: Tensor, names: Sequence[str], low: float, high: float) -> None:
    """Raise `WeightsError` unless all values are within [low, high], which NaN is not.

    `names` has the tensor's name, or one for each index of its first axis. Waits for the device, once.
    """
    if tensor.is_meta:  # a rehearsal: there are no values
        return
    lowest, highest = torch.stack(torch.aminmax(tensor.float() if tensor.is_floating_point() else tensor)).tolist()
    if low <= lowest and highest <= high:
        return
    if len(names) > 1:
        for name, one in zip(names, tensor, strict=True):
            check_range(one, [name], low, high)
    found = lowest if not low <= lowest else highest
    raise WeightsError(f"{names[0]} holds {found}, its values must be from {low:g} to {high:g}; the file is damaged")


def check_finite(scale: Tensor, names: Sequence[str], *, negative: bool = False, zero: bool = True) -> None:
    """Raise `WeightsError` for a scale that is NaN, infinite or, unless allowed, below or at zero."""
    limits = torch.finfo(torch.float32)
    check_range(scale, names, limits.min if negative else 0.0 if zero else limits.tiny, limits.max)


def unsupported(fields: Fields, what: str, known: str) -> UnsupportedModelError:
    """For what a configuration asks, and the `known` things that it could have asked."""
    return UnsupportedModelError(f"{fields.source}: {what} is not supported, only {known}")


def not_fused(name: str, prefix: str) -> UnsupportedModelError:
    """For formats that know experts one by one only."""
    return UnsupportedModelError(f"{prefix}: experts fused in one tensor are not known of {name} checkpoints")


def grouped(prefix: str, inputs: int, group_size: int) -> tuple[int, int]:
    """How many groups a row has, the last one maybe shorter, and the columns of each; a size of -1 makes it one.

    Raises `UnsupportedModelError` where the last group is so short that kernels could read no parts of that size.
    """
    size = inputs if group_size == -1 else group_size
    if inputs != size and math.gcd(inputs, size) % 8:
        raise UnsupportedModelError(f"{prefix}: {inputs} inputs are no multiple of 8, in groups of {size}")
    return -(-inputs // size), size


def even_groups(of_groups: Tensor, columns: int, size: int) -> Tensor:
    """Scales or zeros [..., groups] of groups that tile the columns: shorter ones if the last one of `size` is."""
    if not columns % size:
        return of_groups
    shorter = math.gcd(columns, size)
    return of_groups.repeat_interleave(size // shorter, -1)[..., : columns // shorter].contiguous()


def nibbles(words: Tensor) -> Tensor:
    """The eight 4-bit numbers of each int32, lowest first: [..., words] -> [..., 8 * words] uint8."""
    # Flat first: a last axis of one may have any stride.
    pairs = words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], -1)  # little-endian
    out = torch.empty((*pairs.shape, 2), dtype=torch.uint8, device=words.device)
    torch.bitwise_and(pairs, 15, out=out[..., 0])
    torch.bitwise_right_shift(pairs, 4, out=out[..., 1])
    return out.flatten(-2)
