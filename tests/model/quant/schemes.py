"""Every format of published checkpoints: its settings in config.json, and the encoder of its matrices."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import pytest
import torch

from .encoders import Scheme, awq, awq_gemv, bnb_int8, fp8, gptq, int_quantized, mx, nf4, nvfp4, pack_quantized


def _compressed(form: str, weights: dict[str, object], inputs: dict[str, object] | None) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _float8(**changes: object) -> dict[str, object]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None, **changes}


def _int4(**changes: object) -> dict[str, object]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group", **changes}


def _int8(**changes: object) -> dict[str, object]:
    return _int4(num_bits=8, **changes)


def _float4(**changes: object) -> dict[str, object]:
    return {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **changes}


_NVFP4 = _float4(strategy="tensor_group", group_size=16)


def _modelopt(algorithm: str, **changes: object) -> dict[str, object]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.visual*"], **changes}


def _gptq(**changes: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True, **changes}


_BLOCK_INPUTS = _float8(strategy="group", group_size=128, dynamic=True)
_TOKEN_INPUTS = _float8(strategy="token", dynamic=True)
_STATIC_INPUTS = _float8(strategy="tensor")

SCHEMES: dict[str, Scheme] = {
    "fp8-blocks": Scheme(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        },
        partial(fp8, block=(128, 128), scale="weight_scale_inv", dtype=torch.bfloat16),
    ),
    "fp8-blocks-part-unchanged": Scheme(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 128],
            "modules_to_not_convert": ["model.layers.1.mlp", "lm_head"],
        },
        partial(fp8, block=(32, 128), scale="weight_scale_inv"),
        ("lm_head", "model.layers.1.mlp"),
    ),
    "fp8-tensor-static": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        partial(fp8, block=(0, 0), scale="weight_scale_inv", input_scale="activation_scale", shape=()),
    ),
    "autofp8": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        partial(fp8, block=(0, 0), scale="weight_scale", input_scale="input_scale", shape=()),
    ),
    "ct-fp8-channel": Scheme(
        _compressed("float-quantized", _float8(strategy="channel"), _TOKEN_INPUTS),
        partial(fp8, block=(1, 0), scale="weight_scale", dtype=torch.bfloat16),
    ),
    "ct-fp8-tensor-static": Scheme(
        _compressed("float-quantized", _float8(strategy="tensor"), _STATIC_INPUTS),
        partial(fp8, block=(0, 0), scale="weight_scale", input_scale="input_scale", shape=(1,)),
    ),
    "ct-fp8-block": Scheme(
        _compressed("float-quantized", _float8(strategy="block", block_structure=[128, 128]), _BLOCK_INPUTS),
        partial(fp8, block=(128, 128), scale="weight_scale"),
    ),
    "ct-int4": Scheme(
        _compressed("pack-quantized", _int4(group_size=32), None), partial(pack_quantized, group=32, symmetric=True)
    ),
    "ct-int4-zeros": Scheme(
        _compressed("pack-quantized", _int4(group_size=16, symmetric=False), None),
        partial(pack_quantized, group=16, symmetric=False),
    ),
    "ct-int4-channel": Scheme(
        _compressed("pack-quantized", _int4(strategy="channel"), None),
        partial(pack_quantized, group=-1, symmetric=True, dtype=torch.float16),
    ),
    "ct-int4-actorder": Scheme(
        _compressed("pack-quantized", _int4(group_size=16, actorder="group"), None),
        partial(pack_quantized, group=16, symmetric=True, shuffled=True),
    ),
    "awq": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        partial(awq, group=32),
    ),
    "awq-gemv": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv", "zero_point": True},
        partial(awq_gemv, group=32),
    ),
    "gptq": Scheme(_gptq(), partial(gptq, group=16, symmetric=True, version=1)),
    "gptq-asymmetric": Scheme(
        _gptq(sym=False, group_size=-1), partial(gptq, group=-1, symmetric=False, version=1, with_g_idx=False)
    ),
    "gptq-desc-act": Scheme(_gptq(desc_act=True), partial(gptq, group=16, symmetric=True, version=1, shuffled=True)),
    "gptq-v2": Scheme(
        _gptq(sym=False, desc_act=True, checkpoint_format="gptq_v2"),
        partial(gptq, group=16, symmetric=False, version=2, shuffled=True),
    ),
}
SCHEMES |= {
    "ct-int8-packed": Scheme(
        _compressed("pack-quantized", _int8(strategy="channel"), None),
        partial(pack_quantized, group=-1, symmetric=True, bits=8),
    ),
    "ct-int8-packed-zeros": Scheme(
        _compressed("pack-quantized", _int8(group_size=32, symmetric=False), None),
        partial(pack_quantized, group=32, symmetric=False, bits=8),
    ),
    "ct-int8": Scheme(
        _compressed("int-quantized", _int8(strategy="channel"), _int8(strategy="token", dynamic=True)),
        partial(int_quantized, channels=True),
    ),
    "ct-int8-zeros": Scheme(
        _compressed("int-quantized", _int8(strategy="channel", symmetric=False), None),
        partial(int_quantized, channels=True, symmetric=False),
    ),
    "ct-int8-tensor": Scheme(
        _compressed("int-quantized", _int8(strategy="tensor"), _int8(strategy="token", dynamic=True)),
        partial(int_quantized, channels=False),
    ),
    "gptq-int8": Scheme(
        _gptq(bits=8, desc_act=True, group_size=32),
        partial(gptq, group=32, symmetric=True, version=1, shuffled=True, bits=8),
    ),
    "gptq-int8-asymmetric": Scheme(
        _gptq(bits=8, sym=False, checkpoint_format="gptq_v2"),
        partial(gptq, group=16, symmetric=False, version=2, bits=8),
    ),
    "ct-mxfp4": Scheme(
        _compressed("mxfp4-pack-quantized", _float4(strategy="group", group_size=32), None),
        partial(mx, bits=4, name="weight_packed"),
    ),
    "ct-mxfp8": Scheme(
        _compressed("mxfp8-quantized", _float8(strategy="group", group_size=32, scale_dtype="torch.uint8"), None),
        partial(mx, bits=8, name="weight"),
    ),
    "modelopt-mxfp8": Scheme(_modelopt("MXFP8"), partial(mx, bits=8, name="weight")),
    "modelopt-mxfp4": Scheme(_modelopt("W4A8_MXFP4_FP8"), partial(mx, bits=4, name="weight")),
    "auto-round": Scheme(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 16,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"model.layers.1.mlp": {"bits": 16, "data_type": "float"}, "lm_head": {"bits": 16}},
        },
        partial(gptq, group=16, symmetric=True, version=1, with_g_idx=False),
        ("lm_head", "model.layers.1.mlp"),
    ),
    "fbgemm-fp8": Scheme(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        partial(fp8, block=(1, 0), scale="weight_scale"),
    ),
    "bnb-nf4": Scheme(
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"],
        },
        partial(nf4, nested=True),
        ("lm_head", "model.layers.1.mlp"),
    ),
    "bnb-nf4-plain": Scheme(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        partial(nf4, nested=False),
    ),
    "bnb-int8": Scheme({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None}, bnb_int8),
    "modelopt-nvfp4": Scheme(
        _modelopt(
            "NVFP4",
            config_groups={
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"},
            producer={"name": "modelopt", "version": "0.37.0"},
        ),
        partial(nvfp4, compressed=False),
    ),
    "modelopt-nvfp4-beside": Scheme(
        {
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "exclude_modules": ["lm_head", "model.layers.1.mlp*"],
            }
        },
        partial(nvfp4, compressed=False),
        ("lm_head", "model.layers.1.mlp"),
    ),
    "modelopt-fp8": Scheme(
        _modelopt("FP8"), partial(fp8, block=(0, 0), scale="weight_scale", input_scale="input_scale", shape=())
    ),
    "modelopt-fp8-channel": Scheme(
        _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), partial(fp8, block=(1, 0), scale="weight_scale")
    ),
    "ct-nvfp4": Scheme(
        _compressed(
            "nvfp4-pack-quantized",
            {**_NVFP4, "scale_dtype": "torch.float8_e4m3fn"},
            {**_NVFP4, "dynamic": "local"},
        ),
        partial(nvfp4, compressed=True),
    ),
    "ct-nvfp4a16": Scheme(
        _compressed("nvfp4-pack-quantized", _NVFP4, None), partial(nvfp4, compressed=True, with_inputs=False)
    ),
}
# Other schemes have the same tensors and weights. So these are only read and unpacked, and no model is built of them.
_ALIKE = (
    "awq-gemv",
    "modelopt-nvfp4",
    "modelopt-fp8",
    "modelopt-fp8-channel",
    "modelopt-mxfp4",
    "modelopt-mxfp8",
    "ct-nvfp4a16",
    "ct-int8-packed-zeros",
    "ct-int8-zeros",
    "ct-int8-tensor",
    "gptq-int8-asymmetric",
    "bnb-nf4-plain",
    "auto-round",
    "fbgemm-fp8",
)
OF_MODELS = tuple(name for name in SCHEMES if name not in _ALIKE)
_QUICK = (  # one for each layout
    "fp8-blocks-part-unchanged",
    "ct-fp8-channel",
    "ct-int4-zeros",
    "awq",
    "gptq-desc-act",
    "modelopt-nvfp4-beside",
    "ct-int8",
    "bnb-nf4",
)


def slow_but_some(schemes: Iterable[str] = OF_MODELS, quick: Collection[str] = _QUICK) -> list[object]:
    """Return the parameters of a test that builds a model for each scheme. All but `quick` are slow tests."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in schemes]
