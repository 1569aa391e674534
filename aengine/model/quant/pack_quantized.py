"""compressed-tensors' int4 (`pack-quantized`): eight inputs in a word, zeros packed along the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.linear.weights import Int4Weight
from aengine.model.quant.base import INTEGERS, SCALES, StoredTensor, check_finite, grouped, nibbles, not_fused
from aengine.model.quant.gptq import without_middle
from aengine.model.quant.int4_order import sort_columns


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """`weight_packed` [n, ceil(k/8)], `weight_scale` [n, k/group], `weight_zero_point` [ceil(n/8), k/group]."""

    group_size: int  # -1: the whole row
    symmetric: bool

    @property
    def bits(self) -> int:
        return 5

    @property
    def name(self) -> str:
        return f"pack-quantized int4, groups of {self.group_size}, {'symmetric' if self.symmetric else 'with zeros'}"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("pack-quantized", prefix)
        groups, _ = grouped(prefix, inputs, self.group_size)
        tensors = [
            StoredTensor("packed", f"{prefix}.weight_packed", (outputs, -(-inputs // 8)), ("I32",)),
            StoredTensor("scale", f"{prefix}.weight_scale", (outputs, groups), SCALES),
            StoredTensor("shape", f"{prefix}.weight_shape", (2,), INTEGERS, optional=True),
            StoredTensor("g_idx", f"{prefix}.weight_g_idx", (inputs,), INTEGERS, optional=True),
        ]
        if not self.symmetric:
            name = f"{prefix}.weight_zero_point"
            tensors.append(StoredTensor("zero", name, (-(-outputs // 8), groups), ("I32",)))
        return tuple(tensors)

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Int4Weight:
        check_finite(tensors["scale"], [f"{prefix}.weight_scale" for prefix in prefixes])
        if (shape := tensors.get("shape")) is not None:
            shapes = shape.view(-1, 2).tolist()
            for prefix, found in zip(prefixes, shapes, strict=True):
                if found != [outputs, inputs]:
                    raise WeightsError(f"{prefix}.weight_shape says {found}, config.json {[outputs, inputs]}")
        # Both codes and zeros are stored with 8 added: the same number once more below zero changes nothing.
        codes, order = nibbles(tensors["packed"])[..., :inputs].contiguous(), None
        if (g_idx := tensors.get("g_idx")) is not None:
            _, group = grouped(prefixes[0], inputs, self.group_size)
            codes, order = sort_columns(codes, g_idx, group, [f"{prefix}.weight_g_idx" for prefix in prefixes])
        zero = None
        if not self.symmetric:
            zero = without_middle(nibbles(tensors["zero"].mT)[..., :outputs].mT.contiguous())
        return Int4Weight(codes, tensors["scale"], zero, order)
