"""Adapters of tensors that hold all experts of a layer, as PEFT's `target_parameters` writes them.

One pair of factors serves all experts. The first factor has `experts * rank` rows; the rows of one expert are
contiguous. The second factor has `rank * experts` columns; the columns of one expert are `experts` apart.

Usually the first factor is multiplied with inputs and the second gives outputs. PEFT up to 0.18 mistakes tensors
[experts, outputs, inputs] for [experts, inputs, outputs]. In its files the factors of such tensors are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from aengine.errors import AdapterError
from aengine.model.lora.files import Pair
from aengine.model.spec.feed_forward import ExpertsSpec

_TELLS_INPUTS = 0, 19  # the first PEFT version that does not exchange the factors

Unpack = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The shape of a matrix of each expert, and how its factors are stored."""

    parameter: str
    outputs: int
    inputs: int
    inputs_first: bool  # whether the first factor belongs to the inputs; False in files of old versions

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of the first factor and of the second."""
        return (self.inputs, self.outputs) if self.inputs_first else (self.outputs, self.inputs)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """A layer's experts, if a file has them in one tensor."""

    name: str  # the checkpoint's name for all experts
    hidden: int
    spec: ExpertsSpec

    def matrix(self, pair: Pair, peft: tuple[int, ...] | None) -> tuple[Matrix, int]:
        """Return the matrix that the factors change, and their rank. peft: the version that wrote them, if known.

        Raises `AdapterError` if none or several fit.
        """
        count, inner = self.spec.count, self.spec.inner
        rank, rest = divmod(pair.a.shape[0], count)
        matrices = [
            Matrix(name, outputs, inputs, inputs_first)
            for name, outputs, inputs in (
                ("gate_up_proj" if self.spec.gated else "up_proj", self.spec.columns, self.hidden),
                ("down_proj", self.hidden, inner),
            )
            for inputs_first in ((True,) if self.spec.alternating else (True, False))
        ]
        widths = pair.a.shape[1], pair.b.shape[0]
        fitting = [one for one in matrices if one.widths == widths]
        if rest or not rank or pair.b.shape[1] != pair.a.shape[0] or not fitting:
            raise AdapterError(
                f"{pair.a.path}: {pair.a.name} and lora_B have shapes {list(pair.a.shape)} and {list(pair.b.shape)}, "
                f"which fit neither matrix of {count} experts of {inner} columns; the adapter belongs to another base "
                f"model"
            )
        # If inputs and outputs have the same size, the version decides. New versions exchange the factors of matrices
        # that are transposed, unless columns alternate. If both matrices fit, the module that ends in .base_layer is
        # gate_up.
        if len(fitting) > 1 and peft is not None:
            fitting = [one for one in fitting if one.inputs_first == ((peft >= _TELLS_INPUTS) != self.spec.transposed)]
        if len({one.parameter for one in fitting}) > 1 and pair.module.endswith(".base_layer"):
            fitting = [one for one in fitting if one.parameter == "gate_up_proj"]
        if len(fitting) != 1:
            raise AdapterError(
                f"{pair.a.path}: {pair.a.name} fits several matrices, or one in several ways; save the adapter with "
                f"PEFT 0.19 or later, which says peft_version in adapter_config.json"
            )
        return fitting[0], rank


def unfuse(experts: FusedExperts, matrix: Matrix, rank: int) -> Iterator[tuple[str, Unpack]]:
    """Yield the name of each expert's linear, and a function that extracts its factors from the fused factors."""
    spec = experts.spec
    rows = {spec.down: slice(None)}
    if matrix.parameter == "up_proj":
        rows = {spec.up: slice(None)}
    elif matrix.parameter == "gate_up_proj":
        rows = {spec.gate: slice(spec.inner), spec.up: slice(spec.inner, None)}
        if spec.alternating:
            rows = {spec.gate: slice(0, None, 2), spec.up: slice(1, None, 2)}
    for expert in range(spec.count):
        for part, outputs in rows.items():
            yield f"{experts.name}.{expert}.{part}", _Unpack(expert, spec.count, rank, outputs, matrix.inputs_first)


@dataclass(frozen=True, slots=True)
class _Unpack:
    expert: int
    experts: int
    rank: int
    outputs: slice  # of the matrix's
    inputs_first: bool

    def __call__(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        own = a[self.expert * self.rank : (self.expert + 1) * self.rank]  # [rank, inputs]
        other = b[:, self.expert :: self.experts]  # [outputs, rank]
        if not self.inputs_first:
            own, other = other.t(), own.t()
        return own, other[self.outputs]
