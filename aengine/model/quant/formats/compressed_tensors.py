"""Reads `quant_method: "compressed-tensors"` (llm-compressor). Each group of modules has its own format."""

from __future__ import annotations

from aengine.kernels.linear.weights.e2m1 import Nvfp4Weight
from aengine.kernels.linear.weights.fp8 import Activations
from aengine.model.fields import Fields, shown
from aengine.model.quant.base import LinearFormat, QuantConfig
from aengine.model.quant.checks import unsupported
from aengine.model.quant.formats.fp8 import GROUP, Fp8, read_block
from aengine.model.quant.formats.int4 import read_group_size
from aengine.model.quant.formats.int_quantized import IntQuantized
from aengine.model.quant.formats.mxfp4 import Mxfp4Matrix
from aengine.model.quant.formats.mxfp8 import Mxfp8
from aengine.model.quant.formats.nvfp4 import Nvfp4
from aengine.model.quant.formats.pack_quantized import PackQuantized, PackQuantized8
from aengine.model.quant.names import Names, compressed_tensors_names

_NVFP4, _MXFP4, _MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
_PACKED, _INTEGERS = "pack-quantized", "int-quantized"
_FORMATS = {
    (8, "float"): ("float-quantized", "naive-quantized", _MXFP8),
    (4, "float"): (_NVFP4, _MXFP4),
    (8, "int"): (_INTEGERS, "naive-quantized", _PACKED),
    (4, "int"): (_PACKED,),
}
_MX_GROUP = 32
_MIXED = "mixed-precision"  # each group names its own


def read_compressed_tensors(fields: Fields) -> QuantConfig:
    for key in ("sparsity_config", "transform_config"):
        section = fields.section(key)
        if section is not None and section.names() and section.text("format", "") != "dense":
            raise unsupported(fields, f"{key} that changes weights", "none")
    groups = fields.section("config_groups")
    if groups is None or not groups.names():
        raise fields.fail("config_groups", "is missing or empty")
    sections = [group for name in groups.names() if (group := groups.section(name)) is not None]
    read = [
        (compressed_tensors_names(group, "targets", group.strings("targets")), _format(group, fields))
        for group in sections
    ]
    # The name of a module takes precedence over patterns, and patterns over its class.
    formats = (
        *((Names(exact=names.exact), linear) for names, linear in read),
        *((Names(patterns=names.patterns), linear) for names, linear in read),
        *((Names(all=names.all), linear) for names, linear in read),
    )
    ignore = fields.strings("ignore") if fields.present("ignore") else []
    unchanged = compressed_tensors_names(fields, "ignore", ignore)
    return QuantConfig(fields.source, "compressed-tensors", formats, unchanged, kv_scales=_kv_scales(fields))


def _format(group: Fields, whole: Fields) -> LinearFormat:
    """Return the format of one group. Raises `UnsupportedModelError`, naming the setting."""
    if group.present("output_activations"):
        raise unsupported(group, "output_activations", "weights and input_activations")
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        raise group.fail("weights", "is missing")
    bits, kind = weights.integer("num_bits", 1, 64, 8), weights.text("type", "int").lower()
    if (bits, kind) not in _FORMATS:
        raise unsupported(weights, f"type {shown(kind)} with num_bits {bits}", "float and int with 8 or 4")
    known = _FORMATS[bits, kind]
    source = group if group.present("format") else whole
    layout = source.text("format", _MIXED)
    if layout not in known:
        raise unsupported(source, f"format {shown(layout)} of {kind} with {bits} bits", " and ".join(known))
    if weights.flag("dynamic", default=False):
        raise unsupported(weights, "dynamic true for weights", "false")
    if layout == _NVFP4:
        return _nvfp4(weights)
    if layout in (_MXFP4, _MXFP8):
        return _mx(weights, layout)
    if kind == "float":
        return _fp8(weights, inputs)
    return _packed(weights, bits) if layout == _PACKED else _integers(weights)


def _strategy(args: Fields) -> str:
    """Return which elements share a scale, such as "channel" or "group". In older files it follows from group_size."""
    if args.present("strategy"):
        return args.text("strategy").lower()
    size = args.integer("group_size", -1, 2**20, 0)
    return "tensor" if size == 0 else "channel" if size == -1 else "group"


def _packed(weights: Fields, bits: int) -> PackQuantized:
    """Read packed integers. Inputs stay in floats, which is more exact than `input_activations` of 8 bits."""
    strategy = _strategy(weights)
    if strategy not in ("group", "channel"):
        raise unsupported(weights, f"strategy {shown(strategy)} of int{bits}", "group and channel")
    size = -1 if strategy == "channel" else read_group_size(weights, default=None)
    form = PackQuantized if bits == 4 else PackQuantized8
    return form(size, weights.flag("symmetric", default=True), _ordered(weights))


def _integers(weights: Fields) -> IntQuantized:
    """Read int8. Inputs stay in floats, which is more exact than `input_activations` of 8 bits."""
    strategy = _strategy(weights)
    if strategy not in ("tensor", "channel"):
        raise unsupported(weights, f"strategy {shown(strategy)} of int8", "tensor and channel")
    return IntQuantized(strategy == "channel")


def _mx(weights: Fields, layout: str) -> LinearFormat:
    """Read MXFP4 or MXFP8. Inputs stay in floats."""
    strategy, size = _strategy(weights), weights.integer("group_size", -1, 2**20, _MX_GROUP)
    if strategy != "group" or size != _MX_GROUP or not weights.flag("symmetric", default=True):
        raise unsupported(
            weights, f"strategy {shown(strategy)} with group_size {size} of {layout}", f"group, {_MX_GROUP}, symmetric"
        )
    return Mxfp4Matrix("weight_packed") if layout == _MXFP4 else Mxfp8()


def _nvfp4(weights: Fields) -> Nvfp4:
    """Read NVFP4. Its inputs stay in 16 bits, which is more exact than `input_activations` of 4 bits."""
    strategy, size = _strategy(weights), weights.integer("group_size", -1, 2**20, Nvfp4Weight.group)
    if strategy != "tensor_group" or size != Nvfp4Weight.group:
        raise unsupported(
            weights, f"strategy {shown(strategy)} with group_size {size} of NVFP4", f"tensor_group, {Nvfp4Weight.group}"
        )
    if not weights.flag("symmetric", default=True):
        raise unsupported(weights, "NVFP4 with symmetric false", "true")
    return Nvfp4(compressed=True)


def _ordered(weights: Fields) -> bool:
    """Return whether an index assigns columns to groups. With actorder "weight" and "static", no index is needed."""
    key = "actorder"
    if not weights.present(key):
        return False
    return (
        weights.text(key).lower() in ("group", "dynamic") if weights.is_text(key) else weights.flag(key, default=False)
    )


def _fp8(weights: Fields, inputs: Fields | None) -> Fp8:
    if not weights.flag("symmetric", default=True):
        raise unsupported(weights, "FP8 with symmetric false", "true")
    strategy = _strategy(weights)
    blocks = {"tensor": (0, 0), "channel": (1, 0)}
    if strategy == "block":
        block = _block(weights)
    elif strategy in blocks:
        block = blocks[strategy]
    else:
        raise unsupported(weights, f"strategy {shown(strategy)} of FP8", f"{', '.join(blocks)} and block")
    return Fp8(block, _activations(weights, inputs, block))


def _block(weights: Fields) -> tuple[int, int]:
    """Read [128, 128], or "128x128" in older files."""
    key = "block_structure"
    if weights.present(key) and weights.is_text(key):
        parts = weights.text(key).split("x")
        sizes = [int(part) for part in parts if part.isdecimal() and len(part) < 8]
        return read_block(Fields({key: sizes}, weights.source), key)
    return read_block(weights, key)


def _activations(weights: Fields, inputs: Fields | None, block: tuple[int, int]) -> Activations:
    if inputs is None:
        raise unsupported(weights, "FP8 without input_activations", "with them")
    bits, kind = inputs.integer("num_bits", 1, 64, 8), inputs.text("type", "int").lower()
    if (bits, kind) != (8, "float") or not inputs.flag("symmetric", default=True):
        raise unsupported(inputs, f"type {shown(kind)} with num_bits {bits}", "symmetric float with 8")
    strategy, dynamic = _strategy(inputs), inputs.flag("dynamic", default=False)
    if dynamic and strategy in ("token", "tensor"):
        # One scale for all tokens of a step would make answers depend on other requests. One for each is as exact.
        return "token"
    if dynamic and strategy == "group" and block[1] == GROUP and inputs.integer("group_size", -1, 2**20) == GROUP:
        return "group"
    if not dynamic and strategy == "tensor":
        return "static"
    raise unsupported(
        inputs,
        f"strategy {shown(strategy)}, {'dynamic' if dynamic else 'static'},",
        f"token (dynamic), tensor (static), and group of {GROUP} (dynamic) with weights in blocks",
    )


def _kv_scales(fields: Fields) -> bool:
    """Return whether there are static FP8 scales for keys and values."""
    scheme = fields.section("kv_cache_scheme")
    if scheme is None or scheme.flag("dynamic", default=False):
        return False
    bits, kind, strategy = scheme.integer("num_bits", 1, 64, 8), scheme.text("type", "int").lower(), _strategy(scheme)
    if (bits, kind, strategy) != (8, "float", "tensor"):
        raise unsupported(
            scheme, f"type {shown(kind)} with num_bits {bits}, strategy {shown(strategy)}", "float with 8, tensor"
        )
    return True
