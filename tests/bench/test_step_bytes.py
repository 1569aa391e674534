"""A decode step reads the weights that it multiplies, each once, and its rows' keys and values."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from aengine.model.config import ModelConfig
from bench.shapes import write_config
from bench.step_bytes import expected_experts, step_bytes, weight_bytes

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def config_of(folder: Path, shape: str, quantization: str | None = None) -> ModelConfig:
    write_config(folder, shape, quantization=quantization)
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("shape", ["8b", "0.6b", "qwen2.5-7b"])
def test_all_of_a_dense_model_but_its_embeddings_is_read(shape: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, shape)
    embeddings = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    for tokens in (1, 8):
        assert weight_bytes(config, tokens, BF16) == 2 * (config.parameters - embeddings)


def test_the_7b_shape_is_the_published_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen2.5-7b")
    assert config.parameters == 7_615_616_512  # as its checkpoint's tensors add up
    attention = config.layers[0].attention
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.qkv_bias) == (28, 4, 128, True)
    assert (attention.qk_norm, attention.window) == ("none", None)


def test_keys_and_values_are_read_by_every_row(tmp_path: Path) -> None:
    config = config_of(tmp_path, "8b")
    weights = weight_bytes(config, 4, BF16)
    assert step_bytes(config, 4, 1000, BF16, BF16) - weights == 4 * 1000 * 147_456
    assert step_bytes(config, 4, 1000, BF16, FP8) - weights == 4 * 1000 * 147_456 / 2


def test_states_are_read_and_written_and_latents_are_read_once(tmp_path: Path) -> None:
    recurrent = config_of(tmp_path, "qwen3.5-9b")
    rest = step_bytes(recurrent, 4, 1000, BF16, BF16) - weight_bytes(recurrent, 4, BF16)
    states, keys = 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2), 8 * 2 * 4 * 256 * 2
    assert rest == 4 * (2 * states + 1000 * keys)
    latents = config_of(tmp_path, "deepseek-v2-lite")
    rest = step_bytes(latents, 4, 1000, BF16, BF16) - weight_bytes(latents, 4, BF16)
    assert rest == 4 * 1000 * 27 * (512 + 64) * 2


def test_one_token_reads_the_active_parameters_of_a_mixture_and_many_read_all(tmp_path: Path) -> None:
    config = config_of(tmp_path, "moe30b")
    embeddings = config.vocab_size * config.hidden_size
    assert weight_bytes(config, 1, BF16) == pytest.approx(2 * (config.active_parameters - embeddings))
    assert weight_bytes(config, 10_000, BF16) == pytest.approx(2 * (config.parameters - embeddings))
    assert 4.54e12 / weight_bytes(config, 1, BF16) == pytest.approx(746, rel=0.02)  # tokens per second on an H200


@pytest.mark.parametrize(("quantization", "of_bf16"), [("fp8", 0.5), ("awq", 0.26), ("gptq", 0.26)])
def test_quantised_layers_are_counted_in_their_format(quantization: str, of_bf16: float, tmp_path: Path) -> None:
    config = config_of(tmp_path, "8b", quantization)
    head = 2 * config.vocab_size * config.hidden_size  # stays as it is
    layers = weight_bytes(config, 1, BF16) - head
    plain = 2 * config.parameters - 2 * head
    assert layers / plain == pytest.approx(of_bf16, rel=0.01)


@pytest.mark.parametrize(("count", "top_k", "tokens"), [(5, 2, 1), (5, 2, 2), (5, 2, 3), (4, 1, 3), (3, 3, 2)])
def test_the_expected_experts_are_the_mean_over_all_choices(count: int, top_k: int, tokens: int) -> None:
    choices = list(itertools.combinations(range(count), top_k))
    distinct = [len(set().union(*each)) for each in itertools.product(choices, repeat=tokens)]
    assert expected_experts(count, top_k, tokens) == pytest.approx(sum(distinct) / len(distinct))
