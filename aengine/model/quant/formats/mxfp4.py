"""MXFP4: experts as gpt-oss stores them, and matrices of compressed-tensors and ModelOpt.

gpt-oss has one tensor for all experts of a layer, in which rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.e2m1 import Mxfp4Weight
from aengine.model.fields import Fields
from aengine.model.quant.base import LinearFormat, QuantConfig, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_range, not_fused
from aengine.model.quant.names import Names, hugging_face_names

_RANDOM_SCALE = 120  # 2 ** -7; random codes are about 3
_LARGEST_SCALE = 252  # 6 * 2 ** (253 - 127) is more than a float32 holds; 255 is NaN


@dataclass(frozen=True, slots=True)
class Mxfp4(LinearFormat):
    """`*_blocks` [experts, n, k/32, 16] uint8, the lower half of a byte first, and `*_scales` [experts, n, k/32]."""

    weight_class: ClassVar[type[QuantizedWeight]] = Mxfp4Weight
    bits: ClassVar[int] = 5
    of_experts: ClassVar[bool] = True
    interleaves_gate_up: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "MXFP4 experts"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is None:
            raise UnsupportedModelError(f"{prefix}: MXFP4 is known of experts fused in one tensor only")
        if inputs % Mxfp4Weight.group:
            raise UnsupportedModelError(
                f"{prefix}: {inputs} inputs are no multiple of {Mxfp4Weight.group}, as MXFP4 needs them"
            )
        scales, rows, groups = (
            (experts, outputs, inputs // Mxfp4Weight.group),
            TensorAxis(1),
            TensorAxis(2, Mxfp4Weight.group),
        )
        blocks = (*scales, Mxfp4Weight.group // 2)
        return (
            StoredTensor("blocks", f"{prefix}_blocks", blocks, ("U8",), outputs=rows, inputs=groups),
            StoredTensor(
                "scales", f"{prefix}_scales", scales, ("U8",), outputs=rows, inputs=groups, random_value=_RANDOM_SCALE
            ),
        )

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Mxfp4Weight:
        """Return the weight with rows in the stored order: rows of gate and up alternate."""
        check_range(tensors["scales"], [f"{prefix}_scales" for prefix in prefixes], 0, _LARGEST_SCALE)
        return Mxfp4Weight(tensors["blocks"].flatten(-2), tensors["scales"])


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix(LinearFormat):
    """Codes [n, k/2] uint8, the lower half of a byte first, and `weight_scale` [n, k/32] uint8."""

    weight_class: ClassVar[type[QuantizedWeight]] = Mxfp4Weight
    bits: ClassVar[int] = 5

    codes: str  # name of the tensor

    @property
    def name(self) -> str:
        return "MXFP4"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("these MXFP4", prefix)
        group = Mxfp4Weight.group
        if inputs % group:
            raise UnsupportedModelError(f"{prefix}: {inputs} inputs are no multiple of {group}, as MXFP4 needs them")
        rows, codes, scales = TensorAxis(0), f"{prefix}.{self.codes}", f"{prefix}.weight_scale"
        return (
            StoredTensor("pairs", codes, (outputs, inputs // 2), ("U8",), outputs=rows, inputs=TensorAxis(1, 2)),
            StoredTensor(
                "scale", scales, (outputs, inputs // group), ("U8",), outputs=rows, inputs=TensorAxis(1, group),
                random_value=_RANDOM_SCALE,
            ),
        )  # fmt: skip

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Mxfp4Weight:
        check_range(tensors["scale"], [f"{prefix}.weight_scale" for prefix in prefixes], 0, _LARGEST_SCALE)
        return Mxfp4Weight(tensors["pairs"], tensors["scale"])


def read_mxfp4(fields: Fields) -> QuantConfig:
    """Read `quant_method: "mxfp4"`. Only experts are quantised."""
    unchanged = hugging_face_names(fields, "modules_to_not_convert", "router", "lm_head")
    return QuantConfig(fields.source, "mxfp4", ((Names(runs=frozenset(["experts"])), Mxfp4()),), unchanged)
