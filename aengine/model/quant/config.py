"""The table of quantised formats, and the reading of `quantization_config` in config.json."""

from __future__ import annotations

from collections.abc import Callable

from aengine.errors import UnsupportedModelError
from aengine.model.fields import Fields, shown
from aengine.model.quant.base import QuantConfig
from aengine.model.quant.formats.auto_round import read_auto_round
from aengine.model.quant.formats.awq import read_awq
from aengine.model.quant.formats.bitsandbytes import read_bitsandbytes
from aengine.model.quant.formats.compressed_tensors import read_compressed_tensors
from aengine.model.quant.formats.fp8 import read_fbgemm_fp8, read_fp8
from aengine.model.quant.formats.gptq import read_gptq
from aengine.model.quant.formats.modelopt import read_modelopt
from aengine.model.quant.formats.mxfp4 import read_mxfp4

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
METHODS: dict[str, Callable[[Fields], QuantConfig | None]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
    "bitsandbytes": read_bitsandbytes,
    "auto-round": read_auto_round,
    "fbgemm-fp8": read_fbgemm_fp8,
}


def read_quantization(fields: Fields) -> QuantConfig | None:
    """Return how the model is quantised, or None if it is not. Reads the newer or the older key of config.json.

    Raises `UnsupportedModelError` if a format or a setting is not supported, and `CheckpointError` for values out of
    range. Both name the key.
    """
    section = fields.section("quantization_config")
    if section is None:
        section = fields.section("compression_config")
        if section is None:
            return None
        section = section.section("quantization_config") or section
    default = "compressed-tensors" if section.present("config_groups") else ""
    if section.present("quant_algo") or section.present("quantization"):  # ModelOpt's keys; its groups differ
        default = "modelopt"
    method = section.text("quant_method", default).lower().replace("_", "-")
    if method.startswith("modelopt-"):  # newer files name the algorithm as well
        method = "modelopt"
    if method not in METHODS:
        what = f"quant_method {shown(method)} is not supported" if method else "quant_method is missing"
        raise UnsupportedModelError(
            f"{section.source}: {what}; use an edition of the model in floats or in one of: {', '.join(METHODS)}"
        )
    return METHODS[method](section)
