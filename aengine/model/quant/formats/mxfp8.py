"""MXFP8 of compressed-tensors and ModelOpt: 8-bit floats in groups of 32 that share a power of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.e2m1 import powers_of_two
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.model.quant.base import LinearFormat, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_range, not_fused

_GROUP = 32  # columns that share a scale
_RANDOM_SCALE = 119  # 2 ** -8
_LARGEST_SCALE = 245  # 448 * 2 ** (246 - 127) is more than a float32 holds; 255 is NaN


@dataclass(frozen=True, slots=True)
class Mxfp8(LinearFormat):
    """`weight` [n, k] e4m3, `weight_scale` [n, k/32] uint8. It has no kernel and is dequantised while it is loaded."""

    weight_class: ClassVar[type[QuantizedWeight]] = Fp8Weight
    bits: ClassVar[int] = 16

    @property
    def name(self) -> str:
        return "MXFP8"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("MXFP8", prefix)
        if inputs % _GROUP:
            raise UnsupportedModelError(f"{prefix}: {inputs} inputs are no multiple of {_GROUP}, as MXFP8 needs them")
        rows = TensorAxis(0)
        return (
            StoredTensor(
                "weight", f"{prefix}.weight", (outputs, inputs), ("F8_E4M3",), outputs=rows, inputs=TensorAxis(1)
            ),
            StoredTensor(
                "scale", f"{prefix}.weight_scale", (outputs, inputs // _GROUP), ("U8",), outputs=rows,
                inputs=TensorAxis(1, _GROUP), random_value=_RANDOM_SCALE,
            ),
        )  # fmt: skip

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Fp8Weight:
        check_range(tensors["scale"], [f"{prefix}.weight_scale" for prefix in prefixes], 0, _LARGEST_SCALE)
        return Fp8Weight(tensors["weight"], powers_of_two(tensors["scale"]), (1, _GROUP), "token")
