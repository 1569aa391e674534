"""compressed-tensors' int8 (`int-quantized`): a number in a byte, and one scale for each output or for the matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.integers import Int8Weight
from aengine.model.quant.base import SCALES, LinearFormat, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_finite, not_fused


@dataclass(frozen=True, slots=True)
class IntQuantized(LinearFormat):
    """`weight` [n, k] int8, `weight_scale` [n, 1] or a scalar. Inputs are not quantised: their scales are not used."""

    weight_class: ClassVar[type[QuantizedWeight]] = Int8Weight
    bits: ClassVar[int] = 9

    channels: bool  # whether each output has a scale

    @property
    def name(self) -> str:
        return f"int-quantized int8 with a scale for each {'output' if self.channels else 'matrix'}"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("int-quantized", prefix)
        shape, other_shapes = ((outputs, 1), ((outputs,),)) if self.channels else ((1, 1), ((), (1,)))
        rows = TensorAxis(0) if self.channels else None
        scale, zero = f"{prefix}.weight_scale", f"{prefix}.weight_zero_point"
        return (
            StoredTensor(
                "weight", f"{prefix}.weight", (outputs, inputs), ("I8",), outputs=TensorAxis(0), inputs=TensorAxis(1)
            ),
            StoredTensor("scale", scale, shape, SCALES, other_shapes, outputs=rows),
            StoredTensor("zero", zero, shape, ("I8",), other_shapes, optional=True, outputs=rows),
            StoredTensor("of_inputs", f"{prefix}.input_scale", (), SCALES, ((1,),), optional=True),
            StoredTensor("zero_of_inputs", f"{prefix}.input_zero_point", (), ("I8",), ((1,),), optional=True),
        )

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Int8Weight:
        scale, zero = tensors["scale"], tensors.get("zero")
        check_finite(scale, [f"{prefix}.weight_scale" for prefix in prefixes])
        weight = tensors["weight"]
        rows = (*weight.shape[:-1], 1)
        return Int8Weight(
            unsigned(weight), scale.expand(rows).contiguous(),
            None if zero is None else unsigned(zero).expand(rows).contiguous(),
        )  # fmt: skip


def unsigned(numbers: Tensor) -> Tensor:
    """Return int8 numbers plus 128 in uint8."""
    return numbers.view(torch.uint8) ^ 128
