"""Groups of a checkpoint's tensors. A group is read together and becomes one linear, norm or other parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FLOATS = ("F16", "BF16", "F32", "F64")  # safetensors' names
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a stored tensor that a rank keeps: the concatenation of ranges along one axis."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    def kept_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the kept part of a tensor."""
        kept = sum(stop - start for start, stop in self.ranges)
        return (*shape[: self.axis], kept, *shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that a checkpoint must hold, and the part of it that is read."""

    shape: tuple[int, ...]  # in the checkpoint
    dtypes: tuple[str, ...] = FLOATS
    other_shapes: tuple[tuple[int, ...], ...] = ()  # shapes in some files, with the same number of elements
    optional: bool = False
    replaces: tuple[str, ...] = ()  # if the checkpoint holds this tensor, it must not hold these
    cut: Cut | None = None  # None: the whole tensor is read
    random_value: int | None = None  # fills it if weights are random. None: chosen by its dtype and name.
    at_most: bool = False  # whether it has one axis, and may be shorter
    transposed_as: str = ""  # the entry for a tensor of this name whose last two axes are swapped. Empty: none

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the part that is read."""
        return self.shape if self.cut is None else self.cut.kept_shape(self.shape)


class Group(Protocol):
    """Tensors of a checkpoint that become one parameter, such as a fused linear."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors that the checkpoint must hold, by name."""
        ...

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        """Return a contiguous tensor of the kept shape for each name in `present`. It may return more.

        Called before the first tensor of the group is read.
        """
        ...

    def close(self) -> None:
        """Make the parameter from the tensors. Work that is enqueued later on the current stream sees them filled."""
        ...


class PlainTensor:
    """A group of one tensor, which is used as it is read. Its memory already exists."""

    def __init__(
        self, name: str, tensor: Tensor, ready: Callable[[], None] | None = None, entry: Entry | None = None
    ) -> None:
        """ready: called when the tensor is filled. entry: needed if the tensor is a part of the checkpoint's tensor."""
        self.entries = {name: entry or Entry(tuple(tensor.shape))}
        self._tensor = tensor
        self._ready = ready

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        return dict.fromkeys(self.entries, self._tensor)

    def close(self) -> None:
        if self._ready is not None:
            self._ready()


def entries_of(groups: Iterable[Group]) -> dict[str, Entry]:
    """Return all tensors that a checkpoint may hold, by name."""
    return {name: entry for group in groups for name, entry in group.entries.items()}


def needed(entries: Mapping[str, Entry]) -> list[str]:
    """Return the names of all tensors that are not optional."""
    return [name for name, entry in entries.items() if not entry.optional]


def leave_empty(groups: Iterable[Group]) -> None:
    """Close all groups without filling them. For the meta device."""
    for group in groups:
        group.open(needed(group.entries))
        group.close()
