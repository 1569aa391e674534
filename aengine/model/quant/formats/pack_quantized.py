"""compressed-tensors' int4 and int8 (`pack-quantized`): inputs packed in words, zeros packed along the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.linear.weights.integers import Int4Weight, Int8Weight, IntWeight
from aengine.model.quant.base import INTEGERS, SCALES, LinearFormat, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_finite, not_fused
from aengine.model.quant.formats.int4 import even_groups, grouped, numbers, sort_columns, zeros_unless_symmetric


@dataclass(frozen=True, slots=True)
class PackQuantized(LinearFormat):
    """`weight_packed` [n, ceil(k/8)], `weight_scale` [n, k/group], `weight_zero_point` [ceil(n/8), k/group]."""

    weight_class: ClassVar[type[IntWeight]] = Int4Weight
    bits: ClassVar[int] = 5
    code_bits: ClassVar[int] = 4

    group_size: int  # -1: the whole row
    symmetric: bool
    ordered: bool = False  # whether `weight_g_idx` says which columns are a group

    @property
    def name(self) -> str:
        zeros = "symmetric" if self.symmetric else "with zeros"
        return f"pack-quantized int{self.code_bits}, groups of {self.group_size}, {zeros}"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("pack-quantized", prefix)
        groups, size = grouped(prefix, inputs, self.group_size)
        each = 32 // self.code_bits
        rows, along, words = TensorAxis(0), TensorAxis.of_scales(1, size, inputs), (outputs, -(-inputs // each))
        tensors = [
            StoredTensor(
                "packed", f"{prefix}.weight_packed", words, ("I32",), outputs=rows, inputs=TensorAxis(1, each)
            ),
            StoredTensor("scale", f"{prefix}.weight_scale", (outputs, groups), SCALES, outputs=rows, inputs=along),
            StoredTensor("shape", f"{prefix}.weight_shape", (2,), INTEGERS, optional=True),
            StoredTensor(
                "g_idx", f"{prefix}.weight_g_idx", (inputs,), INTEGERS, optional=True, scatters_columns=self.ordered
            ),
        ]
        if not self.symmetric:
            zeros = f"{prefix}.weight_zero_point", (-(-outputs // each), groups)
            tensors.append(StoredTensor("zero", *zeros, ("I32",), outputs=TensorAxis(0, each), inputs=along))
        return tuple(tensors)

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> IntWeight:
        check_finite(tensors["scale"], [f"{prefix}.weight_scale" for prefix in prefixes])
        if (shape := tensors.get("shape")) is not None:
            shapes = shape.view(-1, 2).tolist()
            for prefix, found in zip(prefixes, shapes, strict=True):
                if found != [outputs, inputs]:
                    raise WeightsError(f"{prefix}.weight_shape says {found}, config.json {[outputs, inputs]}")
        # Codes and zeros are both stored with 8 (or 128) added, which cancels out.
        codes, order = numbers(tensors["packed"], self.code_bits)[..., :inputs].contiguous(), None
        _, group = grouped(prefixes[0], inputs, self.group_size)
        if (g_idx := tensors.get("g_idx")) is not None:
            codes, order = sort_columns(codes, g_idx, group, [f"{prefix}.weight_g_idx" for prefix in prefixes])
        make, zero, columns = self.weight_class, None, codes.shape[-1]
        if not self.symmetric:
            unpacked = numbers(tensors["zero"].mT, self.code_bits)[..., : codes.shape[-2]].mT.contiguous()
            zero = zeros_unless_symmetric(even_groups(unpacked, columns, group), make.middle)
        return make(codes, even_groups(tensors["scale"], columns, group), zero, order)


@dataclass(frozen=True, slots=True)
class PackQuantized8(PackQuantized):
    """The same with four numbers in a word."""

    weight_class: ClassVar[type[IntWeight]] = Int8Weight
    bits: ClassVar[int] = 9
    code_bits: ClassVar[int] = 8
