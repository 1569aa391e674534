"""AWQ's int4. In the gemm layout a word has eight outputs in the order 0 2 4 6 1 3 5 7, in gemv's eight inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.model.fields import Fields, shown
from aengine.model.quant.base import SCALES, LinearFormat, QuantConfig, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_finite, not_fused, unsupported
from aengine.model.quant.formats.int4 import (
    even_groups,
    grouped,
    numbers,
    read_bits,
    read_group_size,
    zeros_unless_symmetric,
)
from aengine.model.quant.names import Names, hugging_face_names

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of each of a word's eight outputs
_GEMV_WORDS = {32: 4, 64: 2}  # in the gemv layout: a row's words of zeros are a multiple, 1 for larger groups


@dataclass(frozen=True, slots=True)
class Awq(LinearFormat):
    """`qweight` [k, n/8], `qzeros` [k/group, n/8], `scales` [k/group, n]."""

    weight_class: ClassVar[type[QuantizedWeight]] = Int4Weight
    bits: ClassVar[int] = 5

    group_size: int  # -1: the whole row

    @property
    def name(self) -> str:
        return f"AWQ, groups of {self.group_size}"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("AWQ", prefix)
        if outputs % 8:
            raise UnsupportedModelError(f"{prefix}: {outputs} outputs are no multiple of 8, as AWQ needs them")
        groups, size = grouped(prefix, inputs, self.group_size)
        words, along = TensorAxis(1, 8), TensorAxis.of_scales(0, size, inputs)
        return (
            StoredTensor(
                "qweight", f"{prefix}.qweight", (inputs, outputs // 8), ("I32",), outputs=words, inputs=TensorAxis(0)
            ),
            StoredTensor("qzeros", f"{prefix}.qzeros", (groups, outputs // 8), ("I32",), outputs=words, inputs=along),
            StoredTensor("scales", f"{prefix}.scales", (groups, outputs), SCALES, outputs=TensorAxis(1), inputs=along),
        )

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Int4Weight:
        check_finite(tensors["scales"], [f"{prefix}.scales" for prefix in prefixes], negative=True)
        codes, (_, group) = _outputs_first(tensors["qweight"]), grouped(prefixes[0], inputs, self.group_size)
        zero, scale = (
            even_groups(one, codes.shape[-1], group)
            for one in (_outputs_first(tensors["qzeros"]), tensors["scales"].mT.contiguous())
        )
        return Int4Weight(codes, scale, zeros_unless_symmetric(zero))


class AwqGemv(Awq):
    """`qweight` [n, k/8], `qzeros` [n, words], `scales` [n, 8 * words]. Zeros and scales after the last group are
    padding.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        return f"{super().name} in the gemv layout"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("AWQ", prefix)
        groups, size = grouped(prefix, inputs, self.group_size)
        if inputs % size or size % 32:
            raise UnsupportedModelError(
                f"{prefix}: {inputs} inputs in groups of {size} are unknown in AWQ's gemv layout"
            )
        multiple = _GEMV_WORDS.get(size, 1)
        words, zeros = -(-groups // (8 * multiple)) * multiple, None if groups == 1 else TensorAxis(1, 8 * size)
        rows, along = TensorAxis(0), TensorAxis.of_scales(1, size, inputs)
        return (
            StoredTensor(
                "qweight", f"{prefix}.qweight", (outputs, inputs // 8), ("I32",), outputs=rows, inputs=TensorAxis(1, 8)
            ),
            StoredTensor("qzeros", f"{prefix}.qzeros", (outputs, words), ("I32",), outputs=rows, inputs=zeros),
            StoredTensor("scales", f"{prefix}.scales", (outputs, 8 * words), SCALES, outputs=rows, inputs=along),
        )

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Int4Weight:
        check_finite(tensors["scales"], [f"{prefix}.scales" for prefix in prefixes], negative=True)
        codes, (_, group) = numbers(tensors["qweight"], 4), grouped(prefixes[0], inputs, self.group_size)
        groups = -(-codes.shape[-1] // group)
        zero, scale = numbers(tensors["qzeros"], 4)[..., :groups], tensors["scales"][..., :groups]
        return Int4Weight(codes, scale.contiguous(), zeros_unless_symmetric(zero.contiguous()))


def _outputs_first(words: Tensor) -> Tensor:
    """[..., rows, n/8] int32 -> [..., n, rows] uint8."""
    columns = words.mT.contiguous()  # transposing words is faster than transposing their numbers
    out = torch.empty((*columns.shape[:-1], 8, columns.shape[-1]), dtype=torch.uint8, device=words.device)
    for output, place in enumerate(_PLACES):
        out[..., output, :] = (columns >> 4 * place) & 15
    return out.flatten(-3, -2)


def read_awq(fields: Fields) -> QuantConfig:
    """Read `quant_method: "awq"`, which AutoAWQ and llm-compressor's converters write."""
    read_bits(fields, "AWQ")
    key = "version" if fields.present("version") else "format"
    layout = fields.text(key, "gemm").lower()
    if layout not in ("gemm", "gemv"):
        raise unsupported(fields, f"{key} {shown(layout)} of AWQ", "gemm and gemv")
    if not fields.flag("zero_point", default=True):
        raise unsupported(fields, "AWQ with zero_point false", "true")
    linear = (Awq if layout == "gemm" else AwqGemv)(read_group_size(fields))
    unchanged = hugging_face_names(fields, "modules_to_not_convert", "lm_head")
    return QuantConfig(fields.source, "awq", ((Names(all=True), linear),), unchanged)
