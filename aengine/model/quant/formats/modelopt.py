"""Reads the settings of NVIDIA's ModelOpt, in config.json or in hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aengine.kernels.linear.weights.e2m1 import Nvfp4Weight
from aengine.model.fields import Fields, shown
from aengine.model.quant.base import LinearFormat, QuantConfig
from aengine.model.quant.checks import unsupported
from aengine.model.quant.formats.fp8 import Fp8
from aengine.model.quant.formats.mxfp4 import Mxfp4Matrix
from aengine.model.quant.formats.mxfp8 import Mxfp8
from aengine.model.quant.formats.nvfp4 import Nvfp4
from aengine.model.quant.names import Names, wildcard_names

_MIXED = "MIXED_PRECISION"  # each module names its own
_ALGORITHMS: Mapping[str, Callable[[], LinearFormat]] = {
    "NVFP4": lambda: Nvfp4(compressed=False),
    "W4A16_NVFP4": lambda: Nvfp4(compressed=False),
    "W4A8_MXFP4_FP8": lambda: Mxfp4Matrix("weight"),
    "MXFP8": Mxfp8,
    "FP8": lambda: Fp8((0, 0), "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda: Fp8((1, 0), "token"),
}


def read_modelopt(fields: Fields) -> QuantConfig | None:
    """Read `quant_algo`. Returns None if only keys and values are quantised."""
    fields = fields.section("quantization") or fields  # hf_quant_config.json has a section more
    _check_cache(fields)
    if not fields.present("quant_algo"):
        return None
    unchanged = wildcard_names(fields, "exclude_modules" if fields.present("exclude_modules") else "ignore")
    if fields.text("quant_algo").upper() == _MIXED:
        return QuantConfig(fields.source, "modelopt", _mixed(fields), unchanged)
    _check_groups(fields)
    return QuantConfig(fields.source, "modelopt", ((Names(all=True), _algorithm(fields)),), unchanged)


def _algorithm(fields: Fields) -> LinearFormat:
    name = fields.text("quant_algo").upper()
    if name not in _ALGORITHMS:
        raise unsupported(fields, f"quant_algo {shown(name)}", ", ".join((*_ALGORITHMS, _MIXED)))
    form = _ALGORITHMS[name]()
    if isinstance(form, Nvfp4):
        _check_group_size(fields)
    return form


def _mixed(fields: Fields) -> tuple[tuple[Names, LinearFormat], ...]:
    """Return the format of each module in `quantized_layers`, or of all modules within it."""
    layers = fields.section("quantized_layers")
    if layers is None or not layers.names():
        raise fields.fail("quantized_layers", "is missing or empty")
    modules: dict[LinearFormat, set[str]] = {}
    for name in layers.names():
        if (layer := layers.section(name)) is not None:
            modules.setdefault(_algorithm(layer), set()).add(name)
    return tuple((Names(runs=frozenset(names)), form) for form, names in modules.items())


def _check_groups(fields: Fields) -> None:
    """Refuse weights in groups of another size. Older files name the size itself, newer ones have `config_groups`."""
    groups = fields.section("config_groups")
    for name in () if groups is None else groups.names():
        group = None if groups is None else groups.section(name)
        weights = None if group is None else group.section("weights")
        if weights is not None and isinstance(_algorithm(fields), Nvfp4):
            _check_group_size(weights)


def _check_group_size(fields: Fields) -> None:
    size = fields.integer("group_size", 1, 2**20, Nvfp4Weight.group)
    if size != Nvfp4Weight.group:
        raise unsupported(fields, f"NVFP4 with group_size {size}", str(Nvfp4Weight.group))


def _check_cache(fields: Fields) -> None:
    algorithm = fields.text("kv_cache_quant_algo", "FP8").upper()
    if algorithm not in ("FP8", "NONE"):
        raise unsupported(fields, f"kv_cache_quant_algo {shown(algorithm)}", "FP8")
