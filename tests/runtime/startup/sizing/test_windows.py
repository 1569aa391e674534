"""Memory is divided between layers with a sliding window and layers without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aengine.cache.windows import WindowRoom
from aengine.config import EngineConfig
from aengine.config.configure import configure
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.runtime.startup.sizing.pool import size_pool

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "vocab_size": 262208,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 168,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
LONG = 131072


@pytest.fixture
def gemma(tmp_path: Path) -> ModelConfig:
    """Gemma 3 27B: 52 layers of 62 have a window of 1024."""
    return read(tmp_path, GEMMA)


def read(folder: Path, values: dict[str, object]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(folder)


def config(**knobs: object) -> EngineConfig:
    return configure(EngineConfig, {}, **knobs)


def test_128k_tokens_take_a_fifth_of_what_full_attention_takes(gemma: ModelConfig) -> None:
    full = LONG * 62 * 2 * 16 * 128 * 2  # bytes of bf16
    alone = config(max_model_len=LONG, max_num_seqs=1)
    pool = size_pool(alone, gemma, torch.bfloat16, full // 5)
    assert pool.max_model_len == LONG
    assert pool.bytes <= full // 5
    assert pool.windows is not None
    assert pool.windows.num_pages >= (1024 + 2048) // 16  # so that the prompt is read in large pieces
    # While tokens are generated: what a window needs, and what everything takes in ten layers.
    held = LONG // 16 * pool.page_bytes + WindowRoom.min_pages(1024, 16) * pool.window_page_bytes
    assert held / full < 0.17
    with pytest.raises(ConfigError, match="max_model_len asks for 131072"):  # pages of all layers go there together
        size_pool(config(max_model_len=LONG, max_num_seqs=1, host_cache_gib=1), gemma, torch.bfloat16, full // 5)


def test_memory_is_divided_for_contexts_of_two_windows(gemma: ModelConfig) -> None:
    available = 100 * 2**30
    pool = size_pool(config(max_num_seqs=16), gemma, torch.bfloat16, available)
    assert pool.windows is not None
    assert pool.windows.num_pages * 2 == pytest.approx(pool.num_pages, rel=0.01)
    assert available * 0.999 < pool.bytes <= available
    longer = size_pool(config(window_context=32768), gemma, torch.bfloat16, available)
    assert longer.windows is not None
    assert longer.windows.num_pages * 32 == pytest.approx(longer.num_pages, rel=0.01)
    assert longer.num_pages > 2.5 * pool.num_pages


def test_all_who_can_run_have_room_for_their_windows(gemma: ModelConfig) -> None:
    available = 100 * 2**30
    many = size_pool(config(), gemma, torch.bfloat16, available)  # 256, more than there is room for
    assert many.windows is not None
    assert 0 <= many.num_pages - many.windows.num_pages <= 5  # less than a page of windows takes
    some = size_pool(config(max_num_seqs=200), gemma, torch.bfloat16, available)
    assert some.windows is not None
    assert 200 * (1024 // 16 + 2) <= some.windows.num_pages < some.num_pages


def test_a_small_window_leaves_the_rest_to_others(tmp_path: Path) -> None:
    small = read(tmp_path, GEMMA | {"sliding_window": 64, "max_position_embeddings": 4096})
    pool = size_pool(config(max_num_seqs=20), small, torch.bfloat16, 4 * 2**30)
    assert pool.windows is not None
    assert pool.windows.num_pages == 20 * 6
    assert pool.num_pages > 20 * pool.windows.num_pages


def test_where_no_context_outgrows_the_window_pages_stay_together(gemma: ModelConfig) -> None:
    assert size_pool(config(max_model_len=1024), gemma, torch.bfloat16, 10**10).windows is None
    assert size_pool(config(max_model_len=1025), gemma, torch.bfloat16, 10**10).windows is not None


def test_where_all_layers_slide_the_others_pages_take_nothing(tmp_path: Path) -> None:
    mistral = read(tmp_path, MISTRAL)
    pool = size_pool(config(max_num_seqs=8), mistral, torch.bfloat16, 10**9)
    assert pool.page_bytes == 0
    assert pool.max_model_len == 32768
    assert pool.windows == WindowRoom(4096, 10**9 // pool.window_page_bytes)


def test_a_memory_that_holds_no_window_is_refused(gemma: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_gib"):
        size_pool(config(), gemma, torch.bfloat16, 10**8)
