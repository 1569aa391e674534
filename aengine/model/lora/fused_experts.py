"""Factors of matrices that hold all experts of a layer, as PEFT's `target_parameters` writes them.

One pair of factors serves all experts. The first has `experts * rank` rows; those of one expert are neighbours. The
second has `rank * experts` columns; those of one expert are `experts` apart. PEFT up to 0.18 mistook [experts, outputs,
inputs] for [experts, inputs, outputs]: there the first factor belongs to the outputs, the second to the inputs. For
matrices that are really stored as [experts, inputs, outputs], the first belongs to the inputs in all versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from aengine.errors import AdapterError
from aengine.model.lora.files import Pair
from aengine.model.spec import ExpertsSpec

_TURNED = 0, 19  # the first version that tells inputs from outputs

Unpack = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of each expert, and how its factors are stored."""

    parameter: str
    outputs: int
    inputs: int
    turned: bool  # False: inputs and outputs are exchanged, as in old versions

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of the first factor and of the second."""
        return (self.inputs, self.outputs) if self.turned else (self.outputs, self.inputs)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """A layer's experts, as files may fuse them."""

    name: str  # of them all in the checkpoint
    hidden: int
    spec: ExpertsSpec

    def matrix(self, pair: Pair, peft: tuple[int, ...] | None) -> tuple[Matrix, int]:
        """Return the matrix that the factors change, and their rank. Raises `AdapterError` if not exactly one fits."""
        count, inner = self.spec.count, self.spec.inner
        rank, rest = divmod(pair.a.shape[0], count)
        matrices = [
            Matrix(name, outputs, inputs, turned)
            for name, outputs, inputs in (
                ("gate_up_proj", 2 * inner, self.hidden),
                ("down_proj", self.hidden, inner),
            )
            for turned in ((True,) if self.spec.transposed else (True, False))
        ]
        widths = pair.a.shape[1], pair.b.shape[0]
        fitting = [one for one in matrices if one.widths == widths]
        if rest or not rank or pair.b.shape[1] != pair.a.shape[0] or not fitting:
            raise AdapterError(
                f"{pair.a.path}: {pair.a.name} and lora_B have shapes {list(pair.a.shape)} and {list(pair.b.shape)}, "
                f"which fit neither matrix of {count} experts of {inner} columns; the adapter belongs to another base "
                f"model"
            )
        # The version decides if inputs and outputs are equally many. If both matrices fit, the inner one is gate_up.
        if len(fitting) > 1 and peft is not None:
            fitting = [one for one in fitting if one.turned == (peft >= _TURNED)]
        if len({one.parameter for one in fitting}) > 1 and pair.module.endswith(".base_layer"):
            fitting = [one for one in fitting if one.parameter == "gate_up_proj"]
        if len(fitting) != 1:
            raise AdapterError(
                f"{pair.a.path}: {pair.a.name} fits several matrices, or one in several ways; save the adapter with "
                f"PEFT 0.19 or later, which says peft_version in adapter_config.json"
            )
        return fitting[0], rank


def unfuse(experts: FusedExperts, matrix: Matrix, rank: int) -> Iterator[tuple[str, Unpack]]:
    """Yield the linears in the matrix, each with a function that takes its factors out of the fused ones."""
    spec = experts.spec
    rows = {spec.down: slice(None)}
    if matrix.parameter == "gate_up_proj":
        rows = {spec.gate: slice(spec.inner), spec.up: slice(spec.inner, None)}
        if spec.transposed:  # by turns
            rows = {spec.gate: slice(0, None, 2), spec.up: slice(1, None, 2)}
    for expert in range(spec.count):
        for part, outputs in rows.items():
            yield f"{experts.name}.{expert}.{part}", _Unpack(expert, spec.count, rank, outputs, matrix.turned)


@dataclass(frozen=True, slots=True)
class _Unpack:
    expert: int
    experts: int
    rank: int
    outputs: slice  # of the matrix's
    turned: bool

    def __call__(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        own = a[self.expert * self.rank : (self.expert + 1) * self.rank]  # [rank, inputs]
        other = b[:, self.expert :: self.experts]  # [outputs, rank]
        if not self.turned:
            own, other = other.t(), own.t()
        return own, other[self.outputs]
