"""How many pages there are, and the sentence that says why there are not enough."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from aengine.config import EngineConfig
from aengine.config.configure import configure
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import resolve_model
from aengine.runtime.startup.sizing.pool import size_pool
from aengine.runtime.startup.sizing.steps import step_tokens

MODEL = ModelConfig.from_folder(resolve_model(None, None))
PAGE_BYTES = sum(2 * 16 * layer.attention.keys * 4 for layer in MODEL.layers)


def config(**knobs: object) -> EngineConfig:
    return configure(EngineConfig, {}, **knobs)


def test_the_pool_fills_what_is_available() -> None:
    pool = size_pool(config(), MODEL, torch.float32, 1000 * PAGE_BYTES + 5)
    assert pool.num_pages == 1000
    assert pool.bytes == 1000 * PAGE_BYTES
    assert pool.max_model_len == MODEL.max_position_embeddings


def test_no_more_pages_than_all_rows_could_fill() -> None:
    pool = size_pool(config(max_num_seqs=2, max_model_len=33), MODEL, torch.float32, 10**12)
    assert pool.num_pages == 2 * 3 + 1


def test_a_small_pool_shortens_the_context_unless_it_was_asked_for() -> None:
    assert size_pool(config(num_pages=5), MODEL, torch.float32, 0).max_model_len == 64
    with pytest.raises(ConfigError, match=r"5 pages.*64 tokens.*max_model_len asks for 100"):
        size_pool(config(num_pages=5, max_model_len=100), MODEL, torch.float32, 0)


@pytest.mark.parametrize(
    ("knob", "value", "available"), [("num_pages", 100_000_000, 0), ("kv_cache_gib", 100.0, 100 * 2**30)]
)
def test_a_pool_beyond_the_memory_that_there_is_is_refused(knob: str, value: float, available: int) -> None:
    asked = config(**{knob: value}, max_num_seqs=4096)
    with pytest.raises(ConfigError, match=rf"^{knob}: .* GiB, and there are 4\.0 GiB of memory"):
        size_pool(asked, MODEL, torch.float32, available, memory=4 * 2**30)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: 99999 .* 2048 positions"):
        size_pool(config(max_model_len=99999), MODEL, torch.float32, 10**12)


def test_a_step_carries_every_running_sequence() -> None:
    assert step_tokens(config(max_num_seqs=1000), default=512) == 1000
    with pytest.raises(ConfigError, match=r"max_step_tokens: 8 is below max_num_seqs \(16\)"):
        step_tokens(config(max_step_tokens=8, max_num_seqs=16), default=512)


def test_page_tables_do_not_outgrow_the_pool() -> None:
    """A context of 2^26 tokens in pages of 256 bytes: what config.json alone claims is not what gets allocated."""
    layer = MODEL.layers[0]
    small = replace(layer, attention=replace(layer.attention, kv_heads=1, head_dim=2))
    tiny = replace(MODEL, layers=(small,), max_position_embeddings=2**26)
    size = size_pool(config(), tiny, torch.float32, 2**30)
    assert 257 * 4 * (size.max_model_len // 16) <= 2**30
