"""Sets of small files as publishers wrote them: tokenizer, generation and quantisation, beside their config.json.

The fields are those of published files, from memory. Tokenizers have few tokens, with the published special ones at
their published ids; matrices have the published formats at a reduced size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.loading.generation import GenerationDefaults
from aengine.model.loading.pooling import PoolingConfig
from aengine.text.tokens.tokenizer import Tokenizer
from tests.model.loading_one import load_model

from .reduced import CONFIGS, reduced

_QWEN = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<tool_call>": 151657}
_QWEN_CONFIG = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}
_GEMMA = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 105, "<end_of_turn>": 106}
_DEEPSEEK = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1}


def _token(content: str) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    return {"__type": "AddedToken", "content": content, "normalized": True, **flags}


# Special tokens with their ids, tokenizer_config.json, generation_config.json, and the tokens that end an answer.
SETS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any], set[str]]] = {
    "Qwen/Qwen3-8B": (
        _QWEN,
        _QWEN_CONFIG,
        {
            "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
            "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
        },
        {"<|im_end|>", "<|endoftext|>"},
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        _QWEN,
        _QWEN_CONFIG,
        {
            "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
            "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
        },
        {"<|im_end|>", "<|endoftext|>"},
    ),
    "Qwen/Qwen3-Embedding-0.6B": (
        _QWEN,
        _QWEN_CONFIG,
        {"bos_token_id": 151643, "eos_token_id": 151643, "max_new_tokens": 2048},
        {"<|im_end|>", "<|endoftext|>"},
    ),
    "meta-llama/Llama-3.1-8B": (
        {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eom_id|>": 128008, "<|eot_id|>": 128009},
        {
            "bos_token": "<|begin_of_text|>", "clean_up_tokenization_spaces": True, "eos_token": "<|end_of_text|>",
            "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        {
            "_from_model_config": True, "bos_token_id": 128000, "do_sample": True, "eos_token_id": 128001,
            "temperature": 0.6, "top_p": 0.9,
        },
        {"<|end_of_text|>"},
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": (
        {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009},
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "model_max_length": int(1e30)},
        {
            "bos_token_id": 128000, "eos_token_id": [128001, 128009], "do_sample": True, "temperature": 0.6,
            "max_length": 4096,
        },
        {"<|end_of_text|>", "<|eot_id|>"},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4, "[TOOL_CALLS]": 5},
        {
            "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>", "legacy": False,
            "model_max_length": int(1e30), "pad_token": None, "sp_model_kwargs": {},
            "spaces_between_special_tokens": False, "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>",
            "use_default_system_prompt": False,
        },
        {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.42.0.dev0"},
        {"</s>"},
    ),
    "google/gemma-3-1b-it": (
        _GEMMA | {"<image_soft_token>": 262144},  # the model has no embedding for it
        {
            "add_bos_token": True, "add_eos_token": False, "boi_token": "<start_of_image>", "bos_token": "<bos>",
            "eos_token": "<eos>", "extra_special_tokens": {"image_token": "<image_soft_token>"},
            "image_token": "<image_soft_token>", "pad_token": "<pad>", "sp_model_kwargs": None,
            "tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>", "use_default_system_prompt": False,
        },
        {
            "cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 106], "pad_token_id": 0,
            "top_k": 64, "top_p": 0.95, "transformers_version": "4.50.0.dev0",
        },
        {"<eos>", "<end_of_turn>"},
    ),
    "openai/gpt-oss-20b": (
        {"<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002, "<|call|>": 200012},
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        {
            "bos_token_id": 199998, "do_sample": True, "eos_token_id": [200002, 199999, 200012],
            "pad_token_id": 199999, "transformers_version": "4.55.0.dev0",
        },
        {"<|return|>", "<|endoftext|>", "<|call|>"},
    ),
    "deepseek-ai/DeepSeek-V3": (
        _DEEPSEEK,
        {
            "add_bos_token": False, "add_eos_token": False, "bos_token": _token("<｜begin▁of▁sentence｜>"),
            "clean_up_tokenization_spaces": False, "eos_token": _token("<｜end▁of▁sentence｜>"), "legacy": True,
            "model_max_length": 131072, "pad_token": _token("<｜end▁of▁sentence｜>"), "sp_model_kwargs": {},
            "unk_token": None, "tokenizer_class": "LlamaTokenizerFast",
        },
        {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6},
        {"<｜end▁of▁sentence｜>"},
    ),
    "zai-org/GLM-4.5-Air": (
        {"<|endoftext|>": 151329, "<|user|>": 151336, "<|observation|>": 151338},
        {
            "additional_special_tokens": ["<|endoftext|>", "<|user|>", "<|observation|>"], "do_lower_case": False,
            "eos_token": "<|endoftext|>", "extra_special_tokens": {}, "model_max_length": 128000,
            "pad_token": "<|endoftext|>", "padding_side": "left", "remove_space": False,
            "tokenizer_class": "PreTrainedTokenizer",
        },
        {"_from_model_config": True, "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        {"<unk>": 0, "<s>": 1, "</s>": 2, "<|endoftext|>": 32000, "<|assistant|>": 32001, "<|end|>": 32007},
        {"add_bos_token": False, "add_eos_token": False, "bos_token": "<s>", "eos_token": "<|endoftext|>"},
        {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": [32000, 32001, 32007], "pad_token_id": 32000},
        {"<|endoftext|>", "<|assistant|>", "<|end|>"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("repository", SETS)
def test_small_files_are_read_together(repository: str, tmp_path: Path) -> None:
    special, tokenizer_config, generation, ends = SETS[repository]
    files = {"config": CONFIGS[repository]["config"], "generation_config": generation}
    for name, values in (files | {"tokenizer_config": tokenizer_config}).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    taken = set(special.values())
    letters = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), (i for i in range(1000) if i not in taken)))
    backend = Backend(models.BPE(letters | special, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.save(str(tmp_path / "tokenizer.json"))

    config = ModelConfig.from_folder(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, config.vocab_size)
    defaults = GenerationDefaults.from_folder(tmp_path, config, tokenizer.eos_token_id)
    assert {tokenizer.token(token_id) for token_id in defaults.eos_token_ids} == ends
    kept = ("temperature", "top_p", "top_k", "repetition_penalty")
    assert defaults.sampling == {name: value for name, value in generation.items() if name in kept}
    for text, token_id in special.items():
        assert tokenizer.encode_now(f"a{text}", add_special_tokens=False)[-1] == token_id
    PoolingConfig.from_folder(tmp_path, config)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
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
    }


_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
_GPTQ = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": None,
    "model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
    "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
    "use_cuda_fp16": False, "use_exllama": True,
}  # fmt: skip
_FLOAT8 = {"num_bits": 8, "type": "float", "group_size": None}
_EXPERTS_MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
# The quantised modules, and `quantization_config`.
QUANTISED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-8B-FP8": ("Qwen/Qwen3-8B", _BLOCKS),
    "Qwen/Qwen3-30B-A3B-FP8": ("Qwen/Qwen3-30B-A3B", _BLOCKS | {"modules_to_not_convert": ["lm_head"]}),
    "deepseek-ai/DeepSeek-V3": ("deepseek-ai/DeepSeek-V3", _BLOCKS),
    "moonshotai/Kimi-K2-Instruct": ("moonshotai/Kimi-K2-Instruct", _BLOCKS),
    "Qwen/Qwen3-8B-AWQ": ("Qwen/Qwen3-8B", _AWQ | {"modules_to_not_convert": None}),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": ("Qwen/Qwen2.5-7B-Instruct", _AWQ | {"modules_to_not_convert": None}),
    "casperhansen/mixtral-instruct-awq": (
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _AWQ | {"modules_to_not_convert": ["gate"]},
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": ("Qwen/Qwen2.5-7B-Instruct", _GPTQ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": (
        "meta-llama/Llama-3.1-8B",
        _compressed("float-quantized", _FLOAT8 | {"strategy": "tensor"}, _FLOAT8 | {"strategy": "tensor"}),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": (
        "meta-llama/Llama-3.1-8B",
        _compressed(
            "float-quantized", _FLOAT8 | {"strategy": "channel"}, _FLOAT8 | {"strategy": "token", "dynamic": True}
        ),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (
        "meta-llama/Llama-3.1-8B",
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None),
    ),
    "openai/gpt-oss-20b": ("openai/gpt-oss-20b", _EXPERTS_MXFP4),
}


@pytest.mark.slow
@pytest.mark.parametrize("repository", QUANTISED)
def test_quantised_ones_are_loaded_with_random_weights(repository: str, tmp_path: Path) -> None:
    base, quantization = QUANTISED[repository]
    config = reduced(CONFIGS[base]["config"]) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig.from_folder(tmp_path)
    quantized = model.quantized
    assert quantized is not None
    assert quantized.method == quantization["quant_method"]
    assert quantized.format_of("lm_head") is None
    load_model(
        tmp_path,
        model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
        load_format="dummy",
        max_positions=256,
    )
