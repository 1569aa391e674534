"""A start counts the keys and values of a draft head in every page."""

from __future__ import annotations

from pathlib import Path

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from tests.model.drafting.mtp_checkpoints import write_mtp_checkpoint


def start(folder: Path, speculation: str) -> Runtime:
    config = EngineConfig(
        model=str(folder), device="cpu", kv_cache_gib=2**-8, max_num_seqs=64, max_model_len=128, speculation=speculation
    )
    return start_runtime(config, folder, ModelConfig.from_folder(folder))


def test_a_model_that_drafts_has_fewer_pages_in_the_same_memory(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path)  # with two layers and one that drafts, all of the same heads
    plain, drafting = start(tmp_path, "off"), start(tmp_path, "mtp")
    assert drafting.pool.page_bytes == plain.pool.page_bytes * 3 // 2
    assert drafting.pool.num_pages == plain.pool.num_pages * 2 // 3
    assert drafting.pool.bytes <= plain.pool.bytes
