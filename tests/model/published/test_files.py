"""Sets of small files as publishers wrote them: tokenizer and generation, beside their config.json.

The fields are those of published files, from memory. Tokenizers have few tokens, with the published special ones at
their published ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from aengine.model.config import ModelConfig
from aengine.model.loading.generation import GenerationDefaults
from aengine.model.loading.pooling import PoolingConfig
from aengine.text.tokens.tokenizer import Tokenizer

from .reduced import CONFIGS

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
