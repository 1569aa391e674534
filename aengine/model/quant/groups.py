"""Groups of tensors that become quantised linears and experts. They are unpacked and fused after reading."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError, WeightsError
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.model.dense import Storage, StoredMatrix
from aengine.model.groups import Entry
from aengine.model.quant.base import LinearFormat, StoredTensor
from aengine.model.quant.read_plan import ReadPlan, why_indivisible
from aengine.model.ranks.shard import ExpertsShare, Range, Split
from aengine.model.slots import ExpertsSlot, LinearSlot
from aengine.model.spec.feed_forward import ExpertsSpec


class QuantizedLinear:
    """A linear of one or several fused matrices, all in one quantised format. Its bias is in floats."""

    def __init__(
        self, linear: LinearSlot, parts: Mapping[str, StoredMatrix], bias: bool, form: LinearFormat, storage: Storage
    ) -> None:
        """parts: the matrices in order, by their names in checkpoints.

        If the linear has more rows than all parts, the last rows are zero.

        Raises `ConfigError` if the format does not allow a rank to read only its columns.
        """
        self._stored = {name: form.stored(name, part.outputs, part.inputs) for name, part in parts.items()}
        self._plans = {
            name: ReadPlan(self._stored[name], (part.outputs, part.inputs), part.split, part.ranges)
            for name, part in parts.items()
        }
        self.entries = {one.name: self._plans[name].entry(one) for name, one in self._tensors()}
        # AutoGPTQ's files have a bias of zeros if the model has none. Ranks with parts of the inputs sum their results,
        # so only the first reads a bias.
        self._biases = {f"{name}.bias": part for name, part in parts.items() if not (part.columns and part.columns[0])}
        self.entries |= {name: replace(part.bias, optional=not bias) for name, part in self._biases.items()}
        self._linear = linear
        self._parts = parts
        self._height = sum(part.kept[0] for part in parts.values())
        self._bias = bias
        self._form = form
        self._storage = storage
        self._places: dict[str, Tensor] = {}
        self._zeros: dict[str, Tensor] = {}  # biases that must be zero
        self._whole_bias: Tensor | None = None

    def _tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        return ((name, one) for name, stored in self._stored.items() for one in stored)

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        device = self._storage.device
        self._places = {
            one.name: self._plans[name].allocate(one, device) for name, one in self._tensors() if one.name in present
        }
        if not self._bias:
            there = {name: part for name, part in self._biases.items() if name in present}
            self._zeros = {name: self._storage.empty(part.kept[0]) for name, part in there.items()}
            return self._places | self._zeros
        self._whole_bias = self._storage.empty(self._linear.outputs)
        rows = self._whole_bias.split([part.kept[0] for part in self._parts.values()])
        return self._places | {f"{name}.bias": part for name, part in zip(self._parts, rows)}

    def close(self) -> None:
        unused, self._zeros = self._zeros, {}
        for name, one in unused.items():
            if bool(one.any()):
                raise WeightsError(f"{name} is not zero, and this model has no such bias")
        bias, self._whole_bias = self._whole_bias, None
        if not self._height:  # this rank has no row of the vocabulary
            zeros = self._storage.empty(self._linear.outputs, self._linear.inputs).zero_()
            self._places = {}
            self._linear.load(self._storage.kernels.dense(zeros, bias))
            return
        weights = []
        for name, part in self._parts.items():
            tensors = {one.key: self._places.pop(one.name) for one in self._stored[name] if one.name in self._places}
            weights.append(self._plans[name].pick(self._form.unpack([name], part.outputs, part.inputs, tensors)))
        whole, more = weights[0].cat(weights[1:], list(self._parts)), self._linear.outputs - self._height
        self._load(whole.pad(more) if more else whole, bias)

    def _load(self, whole: QuantizedWeight, bias: Tensor | None) -> None:
        self._linear.load(self._storage.kernels.quantized(whole, bias, self._storage.dtype))


class DequantizedMatrix(QuantizedLinear):
    """A matrix that is not used as a linear. It is dequantised into existing memory.

    `close` temporarily allocates the matrix in float32 as well.
    """

    def __init__(self, matrix: Tensor, name: str, part: StoredMatrix, form: LinearFormat, storage: Storage) -> None:
        """matrix: the memory, with the shape `part.kept`."""
        rows, columns = part.kept
        super().__init__(LinearSlot(columns, rows), {name: part}, False, form, storage)
        self._matrix = matrix

    def _load(self, whole: QuantizedWeight, bias: Tensor | None) -> None:
        self._matrix.copy_(whole.dequantize())


class QuantizedExperts:
    """A layer's quantised experts. Checkpoints store their matrices one by one, or all in one tensor."""

    def __init__(
        self, experts: ExpertsSlot, name: str, spec: ExpertsSpec, forms: tuple[LinearFormat, LinearFormat],
        storage: Storage, share: ExpertsShare, rule: ExpertRule = SILU,
    ) -> None:  # fmt: skip
        """Args:
        name: The checkpoint's name for all experts.
        forms: The formats of gate and up, and of down.
        share: The experts or columns of this rank.
        """
        gate_up, down = forms
        self._rule = rule
        hidden, inner = experts.hidden, spec.inner
        split: Split | None = None
        gates: list[Range] = []
        if share.columns is not None:
            split, gates = "outputs", [share.columns]
        of_down: Split | None = split and "inputs"
        names = [f"{name}.{expert}.{{}}" for expert in range(*share.experts)]
        *self._before_down, self._down = (
            _ExpertMatrices(form, [one.format(part) for one in names], sizes, along, gates)
            for form, part, sizes, along in (
                *((gate_up, part, (inner, hidden), split) for part in spec.before_down),
                (down, spec.down, (hidden, inner), of_down),
            )
        )
        self._interleaved = gate_up.interleaves_gate_up
        both = [(2 * start, 2 * stop) for start, stop in gates]
        if not spec.gated:
            both = gates
        elif not self._interleaved:
            both = [*gates, *((inner + start, inner + stop) for start, stop in gates)]
        fused_name = "gate_up_proj" if spec.gated else "up_proj"
        own = None if share.count == spec.count else share.experts
        self._fused = (
            _ExpertMatrices(gate_up, [f"{name}.{fused_name}"], (spec.columns, hidden), split, both, spec.count, own),
            _ExpertMatrices(down, [f"{name}.down_proj"], (hidden, inner), of_down, gates, spec.count, own),
        )
        for fused, single in zip(self._fused, (self._before_down[0], self._down)):
            if not fused.is_supported and not single.is_supported:
                single.raise_unsupported()
        self.entries: dict[str, Entry] = {}
        for fused, singles in zip(self._fused, (self._before_down, [self._down])):
            for one in fused.stored:
                covered = tuple(single.name for stack in singles for single in stack.with_key(one.key))
                self.entries[one.name] = fused.plan.entry(one, covered, optional=self._before_down[0].is_supported)
            self.entries |= {one.name: stack.plan.entry(one) for stack in singles for one in stack.stored}
        self._experts = experts
        self._storage = storage

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        stacks = (*self._fused, *self._before_down, self._down)
        return {name: place for stack in stacks for name, place in stack.open(present, self._storage.device)}

    def close(self) -> None:
        gate_up = read = self._fused[0].unpack()
        if gate_up is None:
            first, *rest = (one.unpack_required() for one in self._before_down)
            gate_up = first.cat(rest, [one.name for one in self._before_down]) if rest else first
        elif self._interleaved:
            gate_up = gate_up.even_rows_first()
        down = self._fused[1].unpack() or self._down.unpack_required()
        self._experts.load(self._storage.kernels.quantized_experts(gate_up, down, self._storage.dtype, self._rule))
        # Freed only now. If it were freed earlier, torch would put the new weights into a part of this memory, and the
        # next layer would not fit into the rest.
        del read


def columns_divide(form: LinearFormat, name: str, outputs: int, inputs: int, width: int) -> bool:
    """Return whether each rank can read only its inputs of an expert. width: the inputs of a rank."""
    for experts in (None, 1):  # the format may have experts only one by one, or only fused
        with suppress(UnsupportedModelError):
            return not why_indivisible(form.stored(name, outputs, inputs, experts), inputs, [(0, width)])
    return True  # the format has no such experts; reading them raises


class _ExpertMatrices:
    """One matrix for each expert, all of one shape. They are read into tensors with a leading axis of experts."""

    def __init__(
        self, form: LinearFormat, names: list[str], sizes: tuple[int, int], split: Split | None,
        ranges: Sequence[Range], fused: int | None = None, own: Range | None = None,
    ) -> None:  # fmt: skip
        """Args:
        names: The name of each expert's matrix, or the name of a tensor that has all of them.
        sizes: Outputs and inputs.
        split, ranges: As in `ReadPlan`.
        fused: The number of experts in one tensor. None: each expert has its own tensors.
        own: The experts of this rank in such a tensor. None: all.
        """
        self.name = names[0]
        self._form = form
        self._names = names
        self._sizes = sizes
        self._fused = fused
        self._each: list[tuple[StoredTensor, ...]] = []
        with suppress(UnsupportedModelError):  # the format may have experts only one by one, or only fused
            self._each = [form.stored(name, *sizes, fused) for name in names]
        self.plan = ReadPlan(self._each[0] if self._each else (), sizes, split, ranges, own)
        self._tensors: dict[str, Tensor] = {}

    @property
    def is_supported(self) -> bool:
        """Whether the format can store such matrices."""
        return bool(self._each)

    def raise_unsupported(self) -> None:
        """Raise the `UnsupportedModelError` that says why the format cannot store such matrices."""
        self._form.stored(self.name, *self._sizes)

    @property
    def stored(self) -> Iterator[StoredTensor]:
        return (one for stored in self._each for one in stored)

    def with_key(self, key: str) -> Iterator[StoredTensor]:
        return (one for one in self.stored if one.key == key)

    def open(self, present: Collection[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for number, stored in enumerate(self._each):
            for one in stored:
                if one.name not in present:
                    continue
                if self._fused is not None:
                    self._tensors[one.key] = place = self.plan.allocate(one, device)
                else:
                    if one.key not in self._tensors:
                        self._tensors[one.key] = self.plan.allocate(one, device, len(self._each))
                    place = self._tensors[one.key][number]
                yield one.name, place

    def unpack(self) -> QuantizedWeight | None:
        """Return the weight, with a leading axis of experts. None: the checkpoint has no such tensors."""
        if not self._tensors:
            return None
        tensors, self._tensors = self._tensors, {}
        return self.plan.pick(self._form.unpack(self._names, *self._sizes, tensors))

    def unpack_required(self) -> QuantizedWeight:
        weight = self.unpack()
        if weight is None:
            raise RuntimeError(f"{self.name} is used without having been read")
        return weight
