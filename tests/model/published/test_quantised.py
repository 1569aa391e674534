"""Quantised models as publishers wrote their settings: the right modules are quantised, and random weights load.

The settings are those of published files: of NVIDIA's editions from aiconfigurator, of the others from files on GitHub
or from memory. Long lists of modules are written by rules. The models have a reduced size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aengine.model.config import ModelConfig
from tests.model.loading_one import load_model

from .reduced import CONFIGS, reduced

_LAYERS = range(128)


class Edition(NamedTuple):
    """A quantised model. quantised and floats: some of its modules, within layer 1 if they begin with a dot."""

    base: str  # the repository of its config.json
    settings: dict[str, Any] | None  # `quantization_config`
    quantised: tuple[str, ...] = (".self_attn.o_proj", ".mlp.down_proj")
    floats: tuple[str, ...] = ("lm_head",)
    beside: dict[str, Any] | None = None  # hf_quant_config.json
    method: str = ""  # if it is another than `quant_method`


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    common = {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
    group = {
        "input_activations": inputs and common | {"symmetric": True, "group_size": None} | inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": common | {"symmetric": True} | weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **more,
    }


def _nvfp4(*ignore: str) -> dict[str, Any]:
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": ["lm_head", *ignore],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    }


def _mixed(float8: list[str], float4: list[str]) -> dict[str, Any]:
    """Return the settings of a mixture of FP8 and NVFP4, as ModelOpt writes them into config.json."""
    numbers = {"dynamic": False, "num_bits": 8, "type": "float"}
    four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    layers = {name: {"quant_algo": "FP8"} for name in float8}
    layers |= {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in float4}
    return {
        "config_groups": {
            "group_0": {"input_activations": numbers, "weights": numbers, "targets": float8},
            "group_1": {"weights": four, "targets": float4},
        },
        "ignore": [],
        "producer": {"name": "modelopt", "version": "0.45.0"},
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt",
        "quantized_layers": layers,
    }


def _each_layer(prefix: str, *modules: str) -> list[str]:
    return [f"{prefix}{layer}.{module}" for layer in _LAYERS for module in modules]


_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
_GPTQ = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": None,
    "model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
    "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
    "use_cuda_fp16": False, "use_exllama": True,
}  # fmt: skip
_BITS_AND_BYTES = {
    "_load_in_4bit": False, "_load_in_8bit": True, "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False,
    "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0, "load_in_4bit": False, "load_in_8bit": True, "quant_method": "bitsandbytes",
}  # fmt: skip
_FLOAT8 = {"num_bits": 8, "type": "float", "group_size": None}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
_EXPERTS_MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_TEXT_LAYERS = "model.language_model.layers."
EDITIONS: dict[str, Edition] = {
    "Qwen/Qwen3-8B-FP8": Edition("Qwen/Qwen3-8B", _BLOCKS),
    "Qwen/Qwen3-30B-A3B-FP8": Edition(
        "Qwen/Qwen3-30B-A3B", _BLOCKS | {"modules_to_not_convert": ["lm_head"]}, (".mlp.experts.0.up_proj",)
    ),
    "deepseek-ai/DeepSeek-V3": Edition("deepseek-ai/DeepSeek-V3", _BLOCKS),
    "moonshotai/Kimi-K2-Instruct": Edition("moonshotai/Kimi-K2-Instruct", _BLOCKS),
    "MiniMaxAI/MiniMax-M2.5": Edition(
        "MiniMaxAI/MiniMax-M2",
        _BLOCKS | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        (".self_attn.q_proj", ".block_sparse_moe.experts.3.w1"),
        ("lm_head", ".block_sparse_moe.gate"),
    ),
    "Qwen/Qwen3-8B-AWQ": Edition("Qwen/Qwen3-8B", _AWQ | {"modules_to_not_convert": None}),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": Edition("Qwen/Qwen2.5-7B-Instruct", _AWQ | {"modules_to_not_convert": None}),
    "casperhansen/mixtral-instruct-awq": Edition(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _AWQ | {"modules_to_not_convert": ["gate"]},
        floats=("lm_head", ".block_sparse_moe.gate"),
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Edition("Qwen/Qwen2.5-7B-Instruct", _GPTQ),
    "TheBloke/Wizard-Vicuna-30B-Uncensored-GPTQ": Edition(
        "meta-llama/Llama-2-13b-hf", _GPTQ | {"desc_act": True, "group_size": -1, "model_file_base_name": "model"}
    ),
    "an 8-bit Llama 3.1 of bitsandbytes": Edition("meta-llama/Llama-3.1-8B", _BITS_AND_BYTES),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": Edition(
        "meta-llama/Llama-3.1-8B",
        _compressed("float-quantized", _FLOAT8 | {"strategy": "tensor"}, _FLOAT8 | {"strategy": "tensor"}),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": Edition(
        "meta-llama/Llama-3.1-8B",
        _compressed(
            "float-quantized", _FLOAT8 | {"strategy": "channel"}, _FLOAT8 | {"strategy": "token", "dynamic": True}
        ),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Edition(
        "meta-llama/Llama-3.1-8B", _compressed("pack-quantized", _INT4 | {"group_size": 128}, None)
    ),
    "meta-llama/Llama-3.1-405B-Instruct-FP8": Edition(
        "meta-llama/Llama-3.1-405B",
        {
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": [
                *(f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 125) for name in ("down", "gate", "up")),
                *(f"model.layers.0.self_attn.{name}_proj" for name in "koqv"),
            ],
            "quant_method": "fbgemm_fp8",
        },
        floats=("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"),
        method="fbgemm-fp8",
    ),
    "an EXAONE 4.0 of llm-compressor with W8A8 and keys and values in FP8": Edition(
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
        _compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None},
            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "observer": None},
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
            sparsity_config={},
            transform_config={},
        ),
    ),
    "moonshotai/Kimi-K2.5": Edition(
        "moonshotai/Kimi-K2.5",
        _compressed(
            "pack-quantized", _INT4 | {"group_size": 32}, None,
            ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        ),
        (".mlp.experts.0.up_proj",),
        ("lm_head", ".self_attn.o_proj", ".mlp.shared_experts.up_proj", "model.layers.0.mlp.down_proj"),
    ),
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": Edition(
        "Qwen/Qwen3-32B",
        {
            "config_groups": {"group_0": dict.fromkeys(("input_activations", "weights"), _FLOAT8 | {"dynamic": False})},
            "ignore": ["lm_head"],
            "kv_cache_scheme": "FP8",
            "producer": {"name": "modelopt", "version": "0.31.0"},
            "quant_algo": "FP8",
        },
        method="modelopt",
    ),
    "nvidia/Llama-3.1-70B-Instruct-FP8": Edition(
        "meta-llama/Llama-3.1-70B",
        None,
        beside={
            "producer": {"name": "modelopt", "version": "0.23.0"},
            "quantization": {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8", "quant_algo": "FP8"},
        },
        method="modelopt",
    ),
    "nvidia/DeepSeek-V3.1-NVFP4": Edition(
        "deepseek-ai/DeepSeek-V3",
        None,
        (".self_attn.o_proj", ".mlp.experts.0.up_proj", ".mlp.shared_experts.up_proj"),
        ("lm_head", *(f".self_attn.{name}" for name in _LATENTS)),
        beside={
            "producer": {"name": "modelopt", "version": "0.22.1.dev750+g59a703703"},
            "quantization": {
                "exclude_modules": [
                    "lm_head", *_each_layer("model.layers.", *(f"self_attn.{one}" for one in _LATENTS)),
                ],
                "group_size": 16,
                "kv_cache_quant_algo": "FP8",
                "quant_algo": "NVFP4",
            },
        },
        method="modelopt",
    ),
    "nvidia/Kimi-K2.5-NVFP4": Edition(
        "moonshotai/Kimi-K2.5",
        _nvfp4(
            "language_model.lm_head",
            *_each_layer("language_model.model.layers.", "self_attn*"),
            "mm_projector*",
            "vision_tower*",
        ),
        (".mlp.experts.0.up_proj", ".mlp.shared_experts.up_proj"),
        ("lm_head", ".self_attn.o_proj"),
    ),
    "nvidia/Gemma-4-31B-IT-NVFP4": Edition(
        "google/gemma-4-31B-it",
        _nvfp4(
            "model.embed_vision*", *_each_layer(_TEXT_LAYERS, "self_attn*"), "model.vision_tower*"
        ),
        (".mlp.down_proj",),
        ("lm_head", ".self_attn.o_proj"),
    ),
    "nvidia/MiniMax-M2.7-NVFP4": Edition(
        "MiniMaxAI/MiniMax-M2",
        _nvfp4(*_each_layer("model.layers.", "block_sparse_moe.gate", "self_attn*")),
        (".block_sparse_moe.experts.3.w1",),
        ("lm_head", ".self_attn.q_proj", ".block_sparse_moe.gate"),
    ),
    "nvidia/Qwen3.6-27B-NVFP4": Edition(
        "Qwen/Qwen3.5-27B",
        _mixed(
            _each_layer(
                _TEXT_LAYERS,
                *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")),
                *(f"self_attn.{name}_proj" for name in "koqv"),
            ),
            _each_layer(_TEXT_LAYERS, *(f"mlp.{name}_proj" for name in ("down", "gate", "up"))),
        ),
        (".linear_attn.out_proj", ".mlp.down_proj"),
        ("lm_head", ".linear_attn.in_proj_a"),
    ),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": Edition(
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
        None,
        ("model.layers.0.mixer.in_proj", ".mixer.experts.0.up_proj", ".mixer.fc1_latent_proj"),
        (),
        beside={"quantization": {"kv_cache_quant_algo": "FP8", "quant_algo": "NVFP4"}},
        method="modelopt",
    ),
    "openai/gpt-oss-20b": Edition(
        "openai/gpt-oss-20b", _EXPERTS_MXFP4, (".mlp.experts",), ("lm_head", ".self_attn.o_proj", ".mlp.router")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("repository", EDITIONS)
def test_quantised_ones_are_loaded_with_random_weights(repository: str, tmp_path: Path) -> None:
    edition = EDITIONS[repository]
    config = reduced(CONFIGS[edition.base]["config"])
    config.pop("quantization_config", None)
    if edition.settings is not None:
        config["quantization_config"] = edition.settings
    if edition.beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(edition.beside))
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig.from_folder(tmp_path)
    quantized = model.quantized
    assert quantized is not None
    assert quantized.method == (edition.method or (edition.settings or {})["quant_method"])
    whole = {one: f"model.layers.1{one}" if one.startswith(".") else one for one in edition.quantised + edition.floats}
    assert [one for one in edition.quantised if quantized.format_of(whole[one]) is None] == []
    assert [one for one in edition.floats if quantized.format_of(whole[one]) is not None] == []
    load_model(tmp_path, model, load_format="dummy", max_positions=256)
