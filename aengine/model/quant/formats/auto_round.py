"""Reads Intel's AutoRound, whose tensors are those of GPTQ or AWQ."""

from __future__ import annotations

import re

from aengine.model.fields import Fields, shown
from aengine.model.quant.base import LinearFormat, QuantConfig
from aengine.model.quant.checks import unsupported
from aengine.model.quant.formats.awq import Awq
from aengine.model.quant.formats.gptq import Gptq, Gptq8
from aengine.model.quant.formats.int4 import read_bits, read_group_size
from aengine.model.quant.names import Names, pattern

_FLOATS = 16  # bits
_PLAIN = re.compile(r"[\w.\-]+")


def read_auto_round(fields: Fields) -> QuantConfig:
    """Read `quant_method: "auto-round"`. `extra_config` has settings of single modules."""
    layout = fields.text("packing_format", "auto_round:auto_gptq").lower().removeprefix("auto_round:")
    if layout not in ("gptq", "auto_gptq", "awq", "auto_awq"):
        raise unsupported(fields, f"packing_format {shown(layout)}", "auto_round:auto_gptq and auto_round:auto_awq")
    if (kind := fields.text("data_type", "int")) != "int":
        raise unsupported(fields, f"data_type {shown(kind)}", "int")
    size, is_awq = read_group_size(fields), layout.endswith("awq")
    extra = fields.section("extra_config")
    floats, formats = list[str](), list[tuple[Names, LinearFormat]]()
    for name in () if extra is None else extra.names():
        module = None if extra is None else extra.section(name)
        if module is None:
            continue
        if module.integer("bits", 1, 64, 4) >= _FLOATS:
            floats.append(name)
            continue
        own = read_group_size(module, size)
        formats.append((_names(fields, [name]), _format(module, own, is_awq)))
    formats.append((Names(all=True), _format(fields, size, is_awq)))
    return QuantConfig(fields.source, "auto-round", tuple(formats), _names(fields, [*floats, "lm_head"]))


def _format(fields: Fields, group_size: int, is_awq: bool) -> LinearFormat:
    if is_awq:
        read_bits(fields, "AutoRound in AWQ's layout")
        return Awq(group_size)
    return Gptq(group_size) if read_bits(fields, "AutoRound", (4, 8)) == 4 else Gptq8(group_size)


def _names(fields: Fields, texts: list[str]) -> Names:
    """Read names, whole words of names, or regular expressions for the start of a name."""
    plain = [text for text in texts if _PLAIN.fullmatch(text)]
    patterns = tuple(pattern(fields, "extra_config", text) for text in texts if text not in plain)
    return Names(runs=frozenset(plain), patterns=patterns)
