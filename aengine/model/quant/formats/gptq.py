"""GPTQ's int4 and int8: several inputs in a word, columns grouped by `g_idx`.

Stored zeros are one too low except in `gptq_v2`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.linear.weights.integers import Int4Weight, Int8Weight, IntWeight
from aengine.model.fields import Fields, shown
from aengine.model.quant.base import INTEGERS, SCALES, LinearFormat, QuantConfig, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_finite, not_fused, unsupported
from aengine.model.quant.formats.int4 import (
    even_groups,
    grouped,
    numbers,
    read_bits,
    read_group_size,
    sort_columns,
    zeros_unless_symmetric,
)
from aengine.model.quant.names import Names, hugging_face_names, pattern

_ONES = {4: 0x11111111, 8: 0x01010101}  # one in each of a word's numbers


@dataclass(frozen=True, slots=True)
class Gptq(LinearFormat):
    """`qweight` [k/8, n], `qzeros` [k/group, n/8], `scales` [k/group, n], `g_idx` [k]."""

    weight_class: ClassVar[type[IntWeight]] = Int4Weight
    bits: ClassVar[int] = 5
    code_bits: ClassVar[int] = 4

    group_size: int  # -1: the whole row
    version: int = 1  # 1: the stored zero is one less than the zero
    ordered: bool = False  # whether `g_idx` is required

    @property
    def name(self) -> str:
        ordered = ", desc_act" if self.ordered else ""
        return f"GPTQ v{self.version} int{self.code_bits}, groups of {self.group_size}{ordered}"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("GPTQ", prefix)
        each = 32 // self.code_bits
        if inputs % 8 or outputs % 8:
            raise UnsupportedModelError(f"{prefix}: [{outputs}, {inputs}] is no multiple of 8, as GPTQ needs it")
        groups, size = grouped(prefix, inputs, self.group_size)
        rows, along, zeros = TensorAxis(1), TensorAxis.of_scales(0, size, inputs), (groups, outputs // each)
        order = StoredTensor(
            "g_idx",
            f"{prefix}.g_idx",
            (inputs,),
            INTEGERS,
            optional=not self.ordered,
            scatters_columns=self.ordered,
            random_value=-1,  # the columns are in order
        )
        return (
            StoredTensor(
                "qweight",
                f"{prefix}.qweight",
                (inputs // each, outputs),
                ("I32",),
                outputs=rows,
                inputs=TensorAxis(0, each),
            ),
            StoredTensor("qzeros", f"{prefix}.qzeros", zeros, ("I32",), outputs=TensorAxis(1, each), inputs=along),
            StoredTensor("scales", f"{prefix}.scales", (groups, outputs), SCALES, outputs=rows, inputs=along),
            order,
        )

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> IntWeight:
        check_finite(tensors["scales"], [f"{prefix}.scales" for prefix in prefixes], negative=True)
        codes = numbers(tensors["qweight"].mT, self.code_bits).contiguous()  # [..., n, k]
        order, (_, group) = None, grouped(prefixes[0], inputs, self.group_size)
        if (g_idx := tensors.get("g_idx")) is not None:
            codes, order = sort_columns(codes, g_idx, group, [f"{prefix}.g_idx" for prefix in prefixes])
        # Writers subtract 1 from whole words, with borrows between numbers. Adding to whole words reverses that.
        words = tensors["qzeros"] + _ONES[self.code_bits] if self.version == 1 else tensors["qzeros"]
        zero, scale = (
            even_groups(one.mT.contiguous(), codes.shape[-1], group)  # [..., n, groups]
            for one in (numbers(words, self.code_bits), tensors["scales"])
        )
        make = self.weight_class
        return make(codes, scale, zeros_unless_symmetric(zero, make.middle), order)


@dataclass(frozen=True, slots=True)
class Gptq8(Gptq):
    """The same with four numbers in a word."""

    weight_class: ClassVar[type[IntWeight]] = Int8Weight
    bits: ClassVar[int] = 9
    code_bits: ClassVar[int] = 8


def read_gptq(fields: Fields) -> QuantConfig:
    """Read `quant_method: "gptq"`, which AutoGPTQ, GPTQModel and optimum write."""
    form = Gptq if read_bits(fields, "GPTQ", (4, 8)) == 4 else Gptq8
    key = "checkpoint_format" if fields.present("checkpoint_format") else "format"
    layout = fields.text(key, "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        raise unsupported(fields, f"{key} {shown(layout)} of GPTQ", "gptq and gptq_v2")
    if fields.flag("is_marlin_format", default=False):
        raise unsupported(fields, "is_marlin_format", "gptq and gptq_v2")
    if (words := fields.text("pack_dtype", "int32")) != "int32":
        raise unsupported(fields, f"pack_dtype {shown(words)}", "int32")
    ordered = fields.flag("desc_act", default=False)
    linear = form(read_group_size(fields), 2 if layout == "gptq_v2" else 1, ordered)
    always = () if fields.flag("lm_head", default=False) else ("lm_head",)
    unchanged = hugging_face_names(fields, "modules_to_not_convert", *always)
    patterns = (*unchanged.patterns, *_excluded(fields))
    unchanged = Names(runs=unchanged.runs, endings=unchanged.endings, patterns=patterns)
    return QuantConfig(fields.source, "gptq", ((_included(fields), linear),), unchanged)


def _included(fields: Fields) -> Names:
    """Return the modules that are quantised: all, or those of `modules_in_block_to_quantize`, a list of lists."""
    key = "modules_in_block_to_quantize"
    if not fields.present(key):
        return Names(all=True)
    return Names(runs=frozenset(name for names in fields.lists_of_strings(key) for name in names))


def _excluded(fields: Fields) -> list[re.Pattern[str]]:
    """Return the modules that `dynamic` excludes: an object of patterns, which must begin with "-:"."""
    rules = fields.section("dynamic")
    if rules is None:
        return []
    for rule in rules.names():
        if not rule.startswith("-:"):
            raise unsupported(rules, f"{shown(rule)}: settings of single modules", 'patterns that begin with "-:"')
    return [pattern(fields, "dynamic", rule.removeprefix("-:")) for rule in rules.names()]
