"""NVFP4 as ModelOpt and compressed-tensors store it: two 4-bit floats in a byte, and scales in FP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.e2m1 import Nvfp4Weight
from aengine.model.quant.base import SCALES, LinearFormat, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_finite, check_range, not_fused

_E4M3_MAX = 448


@dataclass(frozen=True, slots=True)
class Nvfp4(LinearFormat):
    """Codes [n, k/2] uint8, the lower half of a byte first, scales [n, k/16] e4m3, and one scale for the matrix.

    Inputs are not quantised, so scales for inputs are not used.
    """

    weight_class: ClassVar[type[QuantizedWeight]] = Nvfp4Weight
    bits: ClassVar[int] = 5

    compressed: bool  # whether compressed-tensors wrote it; its scale of the matrix is a divisor

    @property
    def name(self) -> str:
        return f"NVFP4 of {'compressed-tensors' if self.compressed else 'ModelOpt'}"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("NVFP4", prefix)
        group = Nvfp4Weight.group
        if inputs % group:
            raise UnsupportedModelError(f"{prefix}: {inputs} inputs are no multiple of {group}, as NVFP4 needs them")
        pairs, scale, factor, of_inputs = (f"{prefix}.{name}" for name in self._names)
        rows, scalar = TensorAxis(0), ((1,),)
        return (
            StoredTensor("pairs", pairs, (outputs, inputs // 2), ("U8",), outputs=rows, inputs=TensorAxis(1, 2)),
            StoredTensor(
                "scale", scale, (outputs, inputs // group), ("F8_E4M3",), outputs=rows, inputs=TensorAxis(1, group),
                random_value=1,
            ),
            StoredTensor("factor", factor, (), SCALES, scalar, random_value=256 if self.compressed else None),
            StoredTensor("of_inputs", of_inputs, (), SCALES, scalar, optional=True),
        )  # fmt: skip

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Nvfp4Weight:
        _, scale, factor, _ = self._names
        check_range(tensors["scale"], [f"{prefix}.{scale}" for prefix in prefixes], 0, _E4M3_MAX)
        check_finite(tensors["factor"], [f"{prefix}.{factor}" for prefix in prefixes], zero=not self.compressed)
        of_matrix = tensors["factor"].float()
        if self.compressed:
            of_matrix = 1 / of_matrix
        rows = of_matrix[..., None, None].expand(*tensors["scale"].shape[:-1], 1)
        return Nvfp4Weight(tensors["pairs"], tensors["scale"], rows.contiguous())

    @property
    def _names(self) -> tuple[str, str, str, str]:
        if self.compressed:
            return "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"
        return "weight", "weight_scale", "weight_scale_2", "input_scale"
