"""Groups of parameters by the names that checkpoints use: what is read, and made ready, together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors spells them
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
    """What a rank keeps of a stored tensor: ranges of positions along one axis, one behind the other."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    def kept_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is kept of a tensor of `shape`."""
        kept = sum(stop - start for start, stop in self.ranges)
        return (*shape[: self.axis], kept, *shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Entry:
    """What a checkpoint must hold under one name, and what is read of it."""

    shape: tuple[int, ...]  # in the checkpoint
    dtypes: tuple[str, ...] = FLOATS
    other_shapes: tuple[tuple[int, ...], ...] = ()  # of as many elements, which files have as well
    optional: bool = False
    replaces: tuple[str, ...] = ()  # if it is there, these must not be
    cut: Cut | None = None  # None: all of it is read
    random_value: int | None = None  # fills it where weights are random. None: chosen by its dtype and name.

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the place that it is read into."""
        return self.shape if self.cut is None else self.cut.kept_shape(self.shape)


class Group(Protocol):
    """Tensors of a checkpoint that become one thing together."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What the checkpoint must hold, by name."""
        ...

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        """A place for each that is `present`, contiguous and of the kept shape (others may have places as well).

        Called when the first of them is about to be read.
        """
        ...

    def close(self) -> None:
        """All of them are there, or will be for whatever is enqueued on the current stream from now on."""
        ...


class PlainTensor:
    """One tensor that is used as it is read. It has its memory from the beginning."""

    def __init__(
        self, name: str, tensor: Tensor, ready: Callable[[], None] | None = None, entry: Entry | None = None
    ) -> None:
        """ready: called once the tensor is filled; entry: where the tensor is not all that the checkpoint holds."""
        self.entries = {name: entry or Entry(tuple(tensor.shape))}
        self._tensor = tensor
        self._ready = ready

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        return dict.fromkeys(self.entries, self._tensor)

    def close(self) -> None:
        if self._ready is not None:
            self._ready()


def entries_of(groups: Iterable[Group]) -> dict[str, Entry]:
    """All that a checkpoint may hold, by name."""
    return {name: entry for group in groups for name, entry in group.entries.items()}


def needed(entries: Mapping[str, Entry]) -> list[str]:
    """The names that must be there where nothing stands for others."""
    return [name for name, entry in entries.items() if not entry.optional]


def leave_empty(groups: Iterable[Group]) -> None:
    """Make everything ready without contents: on the meta device, where shapes are all there is."""
    for group in groups:
        group.open(needed(group.entries))
        group.close()
