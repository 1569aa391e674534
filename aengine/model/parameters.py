"""Parameters of a decoder, by the names that checkpoints use, in groups that are read and made ready together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aengine.kernels.base import Kernels
from aengine.kernels.linear.base import Linear, Norm
from aengine.model.linear import LoadedLinear

FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors spells them


@dataclass(frozen=True, slots=True)
class Entry:
    """What a checkpoint must hold under one name."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


class Group(Protocol):
    """Tensors of a checkpoint that become one thing together."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What the checkpoint must hold, by name."""
        ...

    def open(self) -> Mapping[str, Tensor]:
        """A place for each, contiguous and of its shape; called when the first of them is about to be read."""
        ...

    def close(self) -> None:
        """All of them are there, or will be for whatever is enqueued on the current stream from now on."""
        ...


class Plain:
    """One tensor that is used as it is read. It has its memory from the beginning."""

    def __init__(self, name: str, tensor: Tensor, ready: Callable[[], None] | None = None) -> None:
        """ready: called once the tensor is filled."""
        self.entries = {name: Entry(tuple(tensor.shape))}
        self._tensor = tensor
        self._ready = ready

    def open(self) -> Mapping[str, Tensor]:
        return dict.fromkeys(self.entries, self._tensor)

    def close(self) -> None:
        if self._ready is not None:
            self._ready()


class Dense:
    """The parts of a fused matrix of floats, one below the other, and of its bias."""

    def __init__(self, linear: LoadedLinear, parts: Mapping[str, int], bias: bool, make: Parameters) -> None:
        """parts: the checkpoint's names without ".weight" and ".bias", with their output widths, in order."""
        self.entries = {f"{name}.weight": Entry((width, linear.inputs)) for name, width in parts.items()}
        if bias:
            self.entries |= {f"{name}.bias": Entry((width,)) for name, width in parts.items()}
        self._linear = linear
        self._parts = parts
        self._bias = bias
        self._make = make
        self._whole: tuple[Tensor, Tensor | None] | None = None

    def open(self) -> Mapping[str, Tensor]:
        weight = self._make.empty(self._linear.outputs, self._linear.inputs)
        bias = self._make.empty(self._linear.outputs) if self._bias else None
        self._whole = weight, bias
        places = _rows(weight, self._parts, "weight")
        return places if bias is None else places | _rows(bias, self._parts, "bias")

    def close(self) -> None:
        if self._whole is None:
            raise RuntimeError("closed without having been opened")
        self._linear.loaded = self._make.kernels.dense(*self._whole)
        self._whole = None


def _rows(whole: Tensor, parts: Mapping[str, int], kind: str) -> dict[str, Tensor]:
    return {f"{name}.{kind}": rows for name, rows in zip(parts, torch.split(whole, list(parts.values())))}


class Parameters:
    """Makes the parameters of one model on one device ("meta" for shapes alone), and keeps their groups in order."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.groups: list[Group] = []

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that is used as it is."""
        tensor = self.empty(*shape)
        self.groups.append(Plain(name, tensor))
        return tensor

    def norm(self, name: str, width: int, eps: float) -> Norm:
        return self.kernels.norm(self.tensor(f"{name}.weight", width), eps)

    def linear(self, parts: Mapping[str, int], inputs: int, bias: bool = False) -> Linear:
        """A linear of several fused ones: their names in the checkpoint, with their output widths, in order."""
        linear = LoadedLinear(inputs, sum(parts.values()))
        self.groups.append(Dense(linear, parts, bias, self))
        return linear

    def embedding(self, name: str, count: int, width: int, head: str | None) -> tuple[Tensor, Linear]:
        """A table [count, width] and the linear that its rows are scored with: of its own name, or the table again."""
        if head is not None:
            return self.tensor(f"{name}.weight", count, width), self.linear({head: count}, width)
        table, linear = self.empty(count, width), LoadedLinear(width, count)

        def share() -> None:
            linear.loaded = self.kernels.dense(table, None)

        self.groups.append(Plain(f"{name}.weight", table, share))
        return table, linear


def entries_of(groups: Iterable[Group]) -> dict[str, Entry]:
    """All that a checkpoint must hold, by name."""
    return {name: entry for group in groups for name, entry in group.entries.items()}


def leave_empty(groups: Iterable[Group]) -> None:
    """Make everything ready without contents: on the meta device, where shapes are all there is."""
    for group in groups:
        group.open()
        group.close()
