"""Reads matrices of floats. Checkpoints store each matrix separately; blocks use several as one fused matrix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aengine.kernels.base import Kernels
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.linear.fp8.quantize import GROUP, quantize_fp8
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.model.groups import Cut, Entry, PlainTensor
from aengine.model.ranks.shard import ExpertsShare, Range, Split
from aengine.model.slots import ExpertsSlot, LinearSlot
from aengine.model.spec.feed_forward import ExpertsSpec


@dataclass(frozen=True, slots=True)
class Storage:
    """Where and how weights are stored: device, dtype, and the kernels that use them."""

    kernels: Kernels
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [outputs, inputs] of a checkpoint, and the rows or columns that a rank keeps."""

    outputs: int
    inputs: int
    rows: tuple[Range, ...] | None = None  # None: all
    columns: Range | None = None  # None: all; never set together with `rows`

    @property
    def kept(self) -> tuple[int, int]:
        """The number of rows and of columns that are kept."""
        rows, columns = self.rows or ((0, self.outputs),), self.columns or (0, self.inputs)
        return sum(stop - start for start, stop in rows), columns[1] - columns[0]

    @property
    def split(self) -> Split | None:
        return "outputs" if self.rows else "inputs" if self.columns else None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The ranges of outputs, or of inputs, that are kept."""
        return self.rows or (() if self.columns is None else (self.columns,))

    @property
    def weight(self) -> Entry:
        cut = None if self.split is None else Cut(0 if self.split == "outputs" else 1, self.ranges)
        return Entry((self.outputs, self.inputs), cut=cut)

    @property
    def bias(self) -> Entry:
        return Entry((self.outputs,), cut=Cut(0, self.rows) if self.rows else None)


class FloatLinear:
    """A linear of several matrices. They are read into one fused matrix, one below the other. So are their biases."""

    def __init__(
        self,
        linear: LinearSlot,
        parts: Mapping[str, StoredMatrix],
        bias: bool,
        storage: Storage,
        to_fp8: bool = False,
    ) -> None:
        """parts: the matrices in order, by their names in checkpoints without ".weight" and ".bias".

        If the linear has more rows than all parts, the last rows are zero.

        to_fp8: whether the matrix is quantised after it is read.
        """
        self._to_fp8 = to_fp8
        self.entries = {f"{name}.weight": part.weight for name, part in parts.items()}
        if bias:
            self.entries |= {f"{name}.bias": part.bias for name, part in parts.items()}
        self._linear = linear
        self._heights = {name: part.kept[0] for name, part in parts.items()}
        self._bias = bias
        self._storage = storage
        self._whole: tuple[Tensor, Tensor | None] | None = None
        self._read = False  # whether the linear uses the memory of `_whole`, without a copy

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        if self._whole is None:
            weight = self._storage.empty(self._linear.outputs, self._linear.inputs)
            weight[sum(self._heights.values()) :].zero_()
            self._whole = weight, self._storage.empty(self._linear.outputs) if self._bias else None
        weight, bias = self._whole
        places = self._rows(weight, "weight")
        return places if bias is None else places | self._rows(bias, "bias")

    def close(self) -> None:
        if self._whole is None:
            raise RuntimeError("closed without having been opened")
        if self._read:  # a reload wrote the new numbers in place
            self._linear.renew_copy()
            return
        weight, bias = self._whole
        if not weight.is_cuda or self._to_fp8:
            self._whole = None  # the linear has a copy
        self._read = self._whole is not None
        self._linear.load(
            self._storage.kernels.quantized(in_fp8(weight), bias, self._storage.dtype)
            if self._to_fp8
            else self._storage.kernels.dense(weight, bias)
        )

    def _rows(self, whole: Tensor, kind: str) -> dict[str, Tensor]:
        used = whole[: sum(self._heights.values())]
        return {f"{name}.{kind}": rows for name, rows in zip(self._heights, used.split(list(self._heights.values())))}


class FloatExperts:
    """A layer's experts. Checkpoints store their matrices one by one, or all in one tensor.

    Of some families, files have that tensor [experts, inputs, outputs] instead of [experts, outputs, inputs].
    """

    def __init__(
        self,
        experts: ExpertsSlot,
        name: str,
        spec: ExpertsSpec,
        storage: Storage,
        share: ExpertsShare,
        to_fp8: bool = False,
        rule: ExpertRule = SILU,
    ) -> None:
        """name: the checkpoint's name for all of them. share: the rank's.
        to_fp8: whether the matrices are quantised after they are read.
        """
        self._to_fp8 = to_fp8
        self._rule = rule
        hidden, inner = experts.hidden, spec.inner
        gates = share.columns or (0, inner)
        rows = (gates, (gates[0] + inner, gates[1] + inner)) if spec.gated else (gates,)

        def cut(axis: int, *ranges: Range) -> Cut | None:
            return None if share.columns is None else Cut(axis, ranges)

        def cut_fused(axis: int, *ranges: Range) -> Cut | None:
            return cut(axis, *ranges) if share.count == spec.count else Cut(0, (share.experts,))

        self._parts = [  # of each expert
            [f"{name}.{expert}.{part}.weight" for part in (*spec.before_down, spec.down)]
            for expert in range(*share.experts)
        ]
        self._fused = f"{name}.{'gate_up_proj' if spec.gated else 'up_proj'}", f"{name}.down_proj"
        self._transposed: tuple[str, ...] = self._fused if spec.transposed else ()
        if spec.may_be_transposed:
            self._transposed = tuple(f"{fused} (transposed)" for fused in self._fused)
        gate_up = tuple(part for parts in self._parts for part in parts[:-1])
        down = tuple(parts[-1] for parts in self._parts)
        self.entries = {
            **dict.fromkeys(gate_up, Entry((inner, hidden), cut=cut(0, gates))),
            **dict.fromkeys(down, Entry((hidden, inner), cut=cut(1, gates))),
        }
        wholes = (
            Entry((spec.count, spec.columns, hidden), optional=True, replaces=gate_up, cut=cut_fused(1, *rows)),
            Entry((spec.count, hidden, inner), optional=True, replaces=down, cut=cut_fused(2, gates)),
        )
        self._shapes = [whole.kept for whole in wholes]
        self.entries |= dict(zip(self._fused, wholes))
        for fused, turned, whole in zip(self._fused, self._transposed, wholes):
            self.entries[turned] = _transposed(whole)
            if turned != fused:
                self.entries[fused] = replace(whole, transposed_as=turned)
        self._experts = experts
        self._storage = storage
        self._whole: tuple[Tensor, Tensor] | None = None
        self._turned: list[tuple[Tensor, Tensor]] = []  # what was read transposed, and its memory in `_whole`
        self._read = False  # whether the experts use the memory of `_whole`, without a copy

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        if self._whole is None:
            gate_up, down = (self._storage.empty(*shape) for shape in self._shapes)
            self._whole = gate_up, down
        gate_up, down = self._whole
        places = dict(zip(self._fused, self._whole))
        for name, whole in zip(self._transposed, self._whole):
            if name in present:
                places[name] = self._storage.empty(*self.entries[name].kept)
                self._turned.append((places[name], whole))
        for expert, parts in enumerate(self._parts):
            places |= zip(parts[:-1], gate_up[expert].chunk(len(parts) - 1))
            places[parts[-1]] = down[expert]
        return places

    def close(self) -> None:
        if self._whole is None:
            raise RuntimeError("closed without having been opened")
        while self._turned:
            turned, whole = self._turned.pop()
            whole.copy_(turned.transpose(1, 2))
        if self._read:
            return
        gate_up, down = self._whole
        if not down.is_cuda or self._to_fp8:
            self._whole = None
        self._read = self._whole is not None
        self._experts.load(
            self._storage.kernels.quantized_experts(in_fp8(gate_up), in_fp8(down), self._storage.dtype, self._rule)
            if self._to_fp8
            else self._storage.kernels.experts(gate_up, down, self._rule)
        )


def _transposed(entry: Entry) -> Entry:
    """Return the entry of the same matrices [experts, outputs, inputs] in a tensor [experts, inputs, outputs]."""
    experts, outputs, inputs = entry.shape
    cut = entry.cut if entry.cut is None or entry.cut.axis == 0 else Cut(3 - entry.cut.axis, entry.cut.ranges)
    return replace(entry, shape=(experts, inputs, outputs), cut=cut)


class TransposedExperts:
    """Experts as gpt-oss stores them: inputs before outputs, and columns of gate and up alternate.

    gate_up [experts, hidden, 2 * inner] and down [experts, inner, hidden] are transposed and sorted after reading.
    """

    def __init__(
        self,
        experts: ExpertsSlot,
        name: str,
        spec: ExpertsSpec,
        storage: Storage,
        share: ExpertsShare,
        rule: ExpertRule,
    ) -> None:
        """name: the checkpoint's name for all of them. share: the rank's."""
        hidden, inner = experts.hidden, spec.inner
        gate_up, down = None, None
        if share.columns is not None:
            start, stop = share.columns
            gate_up, down = Cut(2, ((2 * start, 2 * stop),)), Cut(1, ((start, stop),))
        elif share.count != spec.count:
            gate_up = down = Cut(0, (share.experts,))
        self._names = f"{name}.gate_up_proj", f"{name}.down_proj"
        self.entries = {
            self._names[0]: Entry((spec.count, hidden, 2 * inner), cut=gate_up),
            self._names[1]: Entry((spec.count, inner, hidden), cut=down),
        }
        self._experts = experts
        self._storage = storage
        self._rule = rule
        self._places: dict[str, Tensor] = {}

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        self._places = {name: self._storage.empty(*entry.kept) for name, entry in self.entries.items()}
        return self._places

    def close(self) -> None:
        gate_up, down = (self._places.pop(name) for name in self._names)
        gate_up = gate_first(gate_up.transpose(1, 2)).contiguous()
        self._experts.load(self._storage.kernels.experts(gate_up, down.transpose(1, 2).contiguous(), self._rule))


def expert_biases(
    name: str, hidden: int, spec: ExpertsSpec, share: ExpertsShare, storage: Storage, another: bool
) -> tuple[tuple[Tensor, Tensor], tuple[PlainTensor, PlainTensor]]:
    """Return the experts' biases for `ExpertRule`, and their groups. Checkpoints alternate biases of gate and up.

    another: whether another rank adds the bias of down, because ranks sum their products.
    """
    first, second = None, None
    if share.columns is not None:
        first = Cut(1, ((2 * share.columns[0], 2 * share.columns[1]),))
    elif share.count != spec.count:
        first = second = Cut(0, (share.experts,))
    entries = Entry((spec.count, 2 * spec.inner), cut=first), Entry((spec.count, hidden), cut=second)
    gate_up, down = (storage.empty(*entry.kept) for entry in entries)

    def sort() -> None:
        gate_up.copy_(gate_first(gate_up))

    def once() -> None:
        if another:
            down.zero_()

    groups = (
        PlainTensor(f"{name}.gate_up_proj_bias", gate_up, sort, entries[0]),
        PlainTensor(f"{name}.down_proj_bias", down, once, entries[1]),
    )
    return (gate_up, down), groups


def gate_first(rows: Tensor) -> Tensor:
    """[experts, 2 * inner, ...] with alternating rows of gate and up -> the rows of gate, then those of up."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def in_fp8(weight: Tensor) -> Fp8Weight:
    """Quantise a matrix [n, k] or [experts, n, k] in blocks of 128 x 128, for inputs in groups of 128 columns."""
    matrices = weight.unsqueeze(0) if weight.dim() == 2 else weight
    made = [quantize_fp8(matrix) for matrix in matrices]
    values, scale = (torch.stack(parts) for parts in zip(*made))
    if weight.dim() == 2:
        values, scale = values[0], scale[0]
    return Fp8Weight(values, scale, (GROUP, GROUP), "group")
