"""Quantised matrices as checkpoints hold them, and as blocks use them: unpacked once all their tensors are there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.linear.weights import Mxfp4Weight, QuantizedWeight
from aengine.model.dense import Storage, Stored
from aengine.model.groups import Entry
from aengine.model.linear import LoadedExperts, LoadedLinear
from aengine.model.quant.base import LinearFormat, StoredTensor
from aengine.model.quant.fuse import fuse
from aengine.model.quant.mxfp4 import gate_first
from aengine.model.quant.narrow import narrow
from aengine.model.spec import ExpertsSpec

# Places of all other dtypes, which are those of scales, are float32.
_PACKED = {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "U8": torch.uint8}


class QuantizedLinear:
    """The parts of a fused matrix in one format, and its bias in floats."""

    def __init__(
        self, linear: LoadedLinear, parts: Mapping[str, Stored], bias: bool, form: LinearFormat, storage: Storage
    ) -> None:
        """parts: by the checkpoint's names of the linears, in order."""
        self._stored = {name: form.stored(name, part.outputs, part.inputs) for name, part in parts.items()}
        self.entries = {one.name: _entry(one) for stored in self._stored.values() for one in stored}
        if bias:
            self.entries |= {f"{name}.bias": part.bias for name, part in parts.items()}
        self._linear = linear
        self._parts = parts
        self._bias = bias
        self._form = form
        self._storage = storage
        self._places: dict[str, Tensor] = {}
        self._whole_bias: Tensor | None = None

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        self._places = {
            one.name: _place(one, self._storage.device)
            for stored in self._stored.values()
            for one in stored
            if one.name in present
        }
        if not self._bias:
            return self._places
        self._whole_bias = self._storage.empty(self._linear.outputs)
        rows = self._whole_bias.split([part.kept[0] for part in self._parts.values()])
        return self._places | {f"{name}.bias": part for name, part in zip(self._parts, rows)}

    def close(self) -> None:
        weights = []
        for name, part in self._parts.items():
            tensors = {one.key: self._places.pop(one.name) for one in self._stored[name] if one.name in self._places}
            weight = self._form.unpack([name], part.outputs, part.inputs, tensors)
            weights.append(narrow(weight, name, part.rows, part.columns))
        whole = fuse(weights, list(self._parts))
        self._linear.loaded = self._storage.kernels.quantized(whole, self._whole_bias, self._storage.dtype)
        self._whole_bias = None


class QuantizedExperts:
    """The matrices of a layer's experts in one format, which checkpoints hold one by one or all in one."""

    def __init__(
        self, experts: LoadedExperts, name: str, spec: ExpertsSpec, forms: tuple[LinearFormat, LinearFormat],
        storage: Storage, columns: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """name: of them all in the checkpoint; forms: of gate and up, and of down; columns: as for `DenseExperts`."""
        gate_up, down = forms
        hidden, inner, count = experts.hidden, spec.inner, spec.count
        names = [f"{name}.{expert}.{{}}" for expert in range(count)]
        self._gate, self._up, self._down = (
            _Stack(form, [one.format(part) for one in names], *sizes)
            for form, part, sizes in (
                (gate_up, spec.gate, (inner, hidden)),
                (gate_up, spec.up, (inner, hidden)),
                (down, spec.down, (hidden, inner)),
            )
        )
        self._fused = (
            _Stack(gate_up, [f"{name}.gate_up_proj"], 2 * inner, hidden, count),
            _Stack(down, [f"{name}.down_proj"], hidden, inner, count),
        )
        for fused, single in zip(self._fused, (self._gate, self._down)):
            if not fused.known and not single.known:
                single.refuse()
        self.entries: dict[str, Entry] = {}
        for fused, singles in zip(self._fused, ((self._gate, self._up), (self._down,))):
            for one in fused.stored:
                covered = tuple(single.name for stack in singles for single in stack.of_key(one.key))
                self.entries[one.name] = _entry(one, covered, optional=self._gate.known)
            self.entries |= {one.name: _entry(one) for stack in singles for one in stack.stored}
        self._experts = experts
        self._storage = storage
        self._columns = columns
        self._inner = inner

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        stacks = (*self._fused, self._gate, self._up, self._down)
        return {name: place for stack in stacks for name, place in stack.open(present, self._storage.device)}

    def close(self) -> None:
        gate_up = self._fused[0].unpack()
        if gate_up is None:
            gate_up = fuse([self._gate.take(), self._up.take()], [self._gate.name, self._up.name])
        elif isinstance(gate_up, Mxfp4Weight):  # whose rows are gate's and up's by turns
            gate_up = Mxfp4Weight(gate_first(gate_up.codes), gate_first(gate_up.scale))
        down = self._fused[1].unpack() or self._down.take()
        if (columns := self._columns) is not None:
            ups = columns[0] + self._inner, columns[1] + self._inner
            halves = [narrow(gate_up, self._gate.name, rows) for rows in (columns, ups)]
            gate_up = fuse(halves, [self._gate.name, self._up.name])
            down = narrow(down, self._down.name, columns=columns)
        self._experts.loaded = self._storage.kernels.quantized_experts(gate_up, down, self._storage.dtype)


class _Stack:
    """Matrices of one shape, one for each expert, in tensors with a leading axis of experts."""

    def __init__(
        self, form: LinearFormat, names: list[str], outputs: int, inputs: int, fused: int | None = None
    ) -> None:
        """names: of each expert's matrix, or the one name of all `fused` experts together."""
        self.name = names[0]
        self._form = form
        self._names = names
        self._sizes = outputs, inputs
        self._fused = fused
        self._each: list[tuple[StoredTensor, ...]] = []
        with suppress(UnsupportedModelError):  # formats that know experts one by one alone, or fused alone
            self._each = [form.stored(name, outputs, inputs, fused) for name in names]
        self._tensors: dict[str, Tensor] = {}

    @property
    def known(self) -> bool:
        """Whether the format has such matrices."""
        return bool(self._each)

    def refuse(self) -> None:
        """Raise `UnsupportedModelError`, saying why the format does not have such matrices."""
        self._form.stored(self.name, *self._sizes)

    @property
    def stored(self) -> Iterator[StoredTensor]:
        return (one for stored in self._each for one in stored)

    def of_key(self, key: str) -> Iterator[StoredTensor]:
        return (one for one in self.stored if one.key == key)

    def open(self, present: Collection[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for number, stored in enumerate(self._each):
            for one in stored:
                if one.name not in present:
                    continue
                if self._fused is not None:
                    self._tensors[one.key] = place = _place(one, device)
                else:
                    if one.key not in self._tensors:
                        self._tensors[one.key] = _place(one, device, len(self._each))
                    place = self._tensors[one.key][number]
                yield one.name, place

    def unpack(self) -> QuantizedWeight | None:
        """The weight, with a leading axis of experts; None where the checkpoint has no such tensors."""
        if not self._tensors:
            return None
        tensors, self._tensors = self._tensors, {}
        return self._form.unpack(self._names, *self._sizes, tensors)

    def take(self) -> QuantizedWeight:
        weight = self.unpack()
        if weight is None:
            raise RuntimeError(f"{self.name} is taken without having been read")
        return weight


def _entry(one: StoredTensor, instead_of: tuple[str, ...] = (), optional: bool = False) -> Entry:
    return Entry(one.shape, one.dtypes, one.spellings, one.optional or optional, instead_of)


def _place(one: StoredTensor, device: torch.device, *lead: int) -> Tensor:
    dtype = next((_PACKED[name] for name in one.dtypes if name in _PACKED), torch.float32)
    return torch.empty((*lead, *one.shape), dtype=dtype, device=device)
