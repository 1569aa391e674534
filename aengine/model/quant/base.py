"""The interface of quantised formats, and the assignment of formats to a model's modules."""

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
    per_element: int = 1  # how many outputs or inputs one element covers

    @classmethod
    def of_scales(cls, axis: int, per_scale: int, total: int) -> TensorAxis | None:
        """Return the axis of scales that cover `per_scale` outputs or inputs each. None: one scale covers all."""
        return cls(axis, per_scale) if per_scale < total else None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the checkpoint's tensors for a quantised matrix."""

    key: str  # its name for `unpack`
    name: str  # its name in the checkpoint
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # allowed dtypes, as safetensors spells them
    other_shapes: tuple[tuple[int, ...], ...] = ()  # shapes in some files, with the same number of elements
    optional: bool = False
    outputs: TensorAxis | None = None  # None: every part of the matrix needs the whole tensor
    inputs: TensorAxis | None = None  # likewise
    scatters_columns: bool = False  # whether its values order the columns, so that ranks cannot read single columns
    at_most: bool = False  # whether the file's tensor has one axis, and may be shorter; zeros follow
    random_value: int | None = None  # fills the tensor if weights are random. None: chosen by its dtype and name.


class LinearFormat(ABC):
    """A format of stored weight matrices, with its parameters. Matrices of equal formats can be fused."""

    __slots__ = ()

    weight_class: ClassVar[type[QuantizedWeight]]  # the class that `unpack` returns
    bits: ClassVar[int]  # approximate bits of a weight, with its share of the scales
    rounds_inputs: ClassVar[bool] = False  # whether products round their inputs; a norm is then part of the rounding
    of_experts: ClassVar[bool] = False  # whether it stores nothing but experts fused in one tensor
    interleaves_gate_up: ClassVar[bool] = False  # whether rows of gate and up alternate in fused experts

    @property
    @abstractmethod
    def name(self) -> str:
        """The format's name in messages and logs."""

    @abstractmethod
    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        """Return the tensors that the checkpoint holds for the matrix `prefix` [outputs, inputs].

        experts: the number of matrices that are stored in one tensor. `prefix` is then the name for all of them. None:
            the tensors are of one matrix.

        Raises `UnsupportedModelError` if the format cannot store such a matrix.
        """

    @abstractmethod
    def unpack(
        self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]
    ) -> QuantizedWeight:
        """Return the matrix, made from its tensors on their device. It may use the memory of the tensors.

        prefixes: names for messages, one for each expert if experts are stored one by one.
        outputs, inputs: the sizes of the whole matrix. If the tensors are cut, the result is a part of it.
        tensors: by `StoredTensor.key`. They may have a leading axis of experts.

        Raises `WeightsError` for values out of range. The error names the tensor.
        """


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How the matrices of one checkpoint are quantised: its formats, and the modules of each format."""

    source: str  # file and key, for messages
    method: str  # as `quant_method` spells it
    formats: tuple[tuple[Names, LinearFormat], ...]  # a module has the first format that names it
    unchanged: Names  # modules that are not quantised, even if `formats` names them
    kv_scales: bool = False  # whether attention modules have a `k_scale` and a `v_scale` for an FP8 cache

    @property
    def bits(self) -> int:
        """Approximate bits of a weight in the largest of the formats, with its share of the scales."""
        return max(form.bits for _, form in self.formats)

    @property
    def rounds_inputs(self) -> bool:
        """Whether products of any of the formats round their inputs."""
        return any(form.rounds_inputs for _, form in self.formats)

    def format_of(self, *modules: str) -> LinearFormat | None:
        """Return the format of linears that will be fused, by names such as "model.layers.0.self_attn.q_proj".

        None: they are not quantised. Do not call this for routers, which are never quantised.

        Raises `UnsupportedModelError` if the formats differ.
        """
        formats = [self._format(module) for module in modules]
        for module, other in zip(modules, formats):
            if other != formats[0]:
                raise UnsupportedModelError(
                    f"{self.source}: {modules[0]} is {_name(formats[0])}, {module} is {_name(other)}; "
                    f"what is computed as one matrix must have one format; use an edition that treats them alike"
                )
        return formats[0]

    def quantizes(self, module: str) -> bool:
        """Return whether the module is quantised."""
        return self._format(module) is not None

    def leaves(self, module: str) -> bool:
        """Return whether the module, such as all experts of a layer, is named among those that are not quantised."""
        return module in self.unchanged.exact

    def without(self, modules: Iterable[str]) -> QuantConfig:
        """Return a copy in which these modules are not quantised either."""
        return replace(self, unchanged=replace(self.unchanged, exact=self.unchanged.exact.union(modules)))

    def _format(self, module: str) -> LinearFormat | None:
        if module in self.unchanged:
            return None
        return next((form for names, form in self.formats if module in names), None)


def _name(form: LinearFormat | None) -> str:
    return "not quantised" if form is None else form.name
