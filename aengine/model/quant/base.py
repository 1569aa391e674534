"""What the loader knows of a quantised format, and which modules of a model have which format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.model.quant.names import Names

SCALES = ("BF16", "F16", "F32")  # dtypes of scales, as safetensors spells them
INTEGERS = ("I32", "I64")


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """The axis of a tensor that runs along its matrix's outputs, or along its inputs."""

    axis: int
    per_element: int = 1  # outputs, or inputs, that an element belongs to

    @classmethod
    def of_scales(cls, axis: int, per_scale: int, total: int) -> TensorAxis | None:
        """Return the axis of scales, one for each `per_scale` of all `total`. None: one scale serves all."""
        return cls(axis, per_scale) if per_scale < total else None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint that a matrix is made from."""

    key: str  # what `unpack` calls it
    name: str  # what the checkpoint calls it
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # any of these, as safetensors spells them
    other_shapes: tuple[tuple[int, ...], ...] = ()  # of as many elements, which files have as well
    optional: bool = False
    outputs: TensorAxis | None = None  # None: every part of the matrix needs the whole tensor
    inputs: TensorAxis | None = None
    scatters_columns: bool = False  # it says which columns are a group; until it is read, no column can be found
    random_value: int | None = None  # fills the tensor where weights are random. None: chosen by its dtype and name.


class LinearFormat(ABC):
    """A format that weight matrices are stored in, with its parameters. Matrices of equal formats can be fused."""

    __slots__ = ()

    weight_class: ClassVar[type[QuantizedWeight]]  # what `unpack` returns
    bits: ClassVar[int]  # about how many a weight takes, with its share of the scales
    rounds_inputs: ClassVar[bool] = False  # whether products round their inputs; a norm is then part of the rounding
    gate_up_by_turns: ClassVar[bool] = False  # whether rows of gate and of up alternate in fused experts

    @property
    @abstractmethod
    def name(self) -> str:
        """For messages and logs."""

    @abstractmethod
    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        """Return the tensors that the checkpoint holds for the matrix `prefix` [outputs, inputs].

        experts: so many matrices are fused in tensors of three axes; `prefix` is the checkpoint's name for all of them.
        Raises `UnsupportedModelError` if the format does not have this, or not this shape.
        """

    @abstractmethod
    def unpack(
        self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """Return the matrix made of its tensors, on their device. The weight may keep using the tensors.

        prefixes: for messages; one for each expert if experts are stored one by one.
        outputs, inputs: of the whole matrix. If tensors are cut as `StoredTensor` allows, the result is that part.
        tensors: by their keys. They may have a leading axis of experts.
        Raises `WeightsError`, naming the tensor, for values that no such tensor has.
        """


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How the matrices of one checkpoint are quantised: its formats, and the modules that have each."""

    source: str  # file and key, for messages
    method: str  # as `quant_method` spells it
    formats: tuple[tuple[Names, LinearFormat], ...]  # the first that names a module is the module's
    unchanged: Names  # modules that stay as they are, whatever `formats` says
    kv_scales: bool = False  # whether attention modules have a `k_scale` and a `v_scale` for an FP8 cache

    @property
    def bits(self) -> int:
        """About how many a weight takes in the widest of the formats, with its share of the scales."""
        return max(form.bits for _, form in self.formats)

    @property
    def rounds_inputs(self) -> bool:
        """Whether products of any of the formats round their inputs."""
        return any(form.rounds_inputs for _, form in self.formats)

    def format_of(self, *modules: str) -> LinearFormat | None:
        """Return the format of these linears ("model.layers.0.self_attn.q_proj"), which are fused. None: not quantised.

        Do not ask about routers, which are never quantised. Raises `UnsupportedModelError` if the formats differ.
        """
        formats = [self._format(module) for module in modules]
        for module, other in zip(modules, formats):
            if other != formats[0]:
                raise UnsupportedModelError(
                    f"{self.source}: {modules[0]} is {_name(formats[0])}, {module} is {_name(other)}; "
                    f"what is computed as one matrix must have one format"
                )
        return formats[0]

    def quantizes(self, module: str) -> bool:
        """Return whether the module is quantised."""
        return self._format(module) is not None

    def without(self, modules: Iterable[str]) -> QuantConfig:
        """Return a copy in which these modules stay as they are as well."""
        return replace(self, unchanged=replace(self.unchanged, exact=self.unchanged.exact.union(modules)))

    def _format(self, module: str) -> LinearFormat | None:
        if module in self.unchanged:
            return None
        return next((form for names, form in self.formats if module in names), None)


def _name(form: LinearFormat | None) -> str:
    return "not quantised" if form is None else form.name
