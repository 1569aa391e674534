"""Chats whose KV was evicted: after a restart their next turns find it on the disk."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from aengine.cache.tiers.disk import DiskPages
from aengine.errors import ConfigError
from aengine.model.loading.hub import DEMO
from tests.engine.addons.chats import CHATS, PAGE, TOKENS, all_copied, ask, chat, engine_with, talk, until
from tests.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.anyio


def files(folder: Path) -> list[Path]:
    """Of pages."""
    return sorted(folder.glob("*/*.kv"))


@pytest.mark.slow
async def test_a_restart_is_warm(tmp_path: Path) -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        first = await talk(engine, [list(one) for one in chats])
        await all_copied(engine)
        assert engine.stats().disk_bytes > 0
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        again = await talk(engine, chats)
        stats = engine.stats()
    assert [turn.token_ids for turn in again] == [turn.token_ids for turn in first]
    assert all(turn.usage.cached_tokens >= TOKENS - PAGE for turn in again)
    assert stats.cached_disk_tokens == sum(turn.usage.cached_tokens for turn in again)
    assert stats.disk_loads * PAGE == stats.cached_disk_tokens


async def test_another_model_finds_nothing(tmp_path: Path) -> None:
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        await ask(engine, chat(0))
        await all_copied(engine)
    async with engine_with(disk_cache_dir=str(tmp_path), load_format="dummy", seed=1) as engine:
        assert (await ask(engine, chat(0))).usage.cached_tokens == 0


async def test_the_weights_tell_whose_pages_they_are_not_the_times_of_their_files(tmp_path: Path) -> None:
    """A tensor differs far inside a file of the same size and time, as after tar or rsync."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    knobs = {"model": str(folder), "disk_cache_dir": str(tmp_path / "pages")}
    async with engine_with(**knobs) as engine:
        own = await ask(engine, chat(0))
        await all_copied(engine)
    file = folder / "model.safetensors"
    os.utime(file, ns=(10**18, 10**18))
    async with engine_with(**knobs) as engine:
        assert (await ask(engine, chat(0))).usage.cached_tokens > 0
    with file.open("r+b") as weights:
        weights.seek(2**21)
        weights.write(bytes(file.stat().st_size // 2))
    os.utime(file, ns=(10**18, 10**18))
    async with engine_with(**knobs) as engine:
        other = await ask(engine, chat(0))
    assert (other.usage.cached_tokens, other.token_ids != own.token_ids) == (0, True)


async def test_keys_that_are_rotated_otherwise_are_not_found(tmp_path: Path) -> None:
    """By longrope, whose factors depend on whether a request may leave the trained context of 128 tokens."""
    folder = tmp_path / "phi3"
    write_checkpoint("phi3-beyond-the-trained-context", folder, vocab_size=4096, original_max_position_embeddings=128)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    knobs = {"model": str(folder), "disk_cache_dir": str(tmp_path / "pages")}
    async with engine_with(**knobs, max_model_len=256) as engine:
        far = await ask(engine, chat(0, 100), max_tokens=100)
        await all_copied(engine)
        near = await ask(engine, chat(0, 100))
        await all_copied(engine)
    assert (far.usage.cached_tokens, near.usage.cached_tokens) == (0, 0)
    async with engine_with(**knobs, max_model_len=120) as engine:  # all requests are near
        again = await ask(engine, chat(0, 100))
    assert again.token_ids == near.token_ids
    assert again.usage.cached_tokens == 96
    async with engine_with(**knobs, max_model_len=256) as engine:
        again = await ask(engine, chat(0, 100), max_tokens=100)
    assert again.token_ids == far.token_ids
    assert again.usage.cached_tokens == 96


async def test_a_damaged_file_is_computed_anew_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        first = await ask(engine, chat(0))
        await all_copied(engine)
    (tmp_path / "notes.txt").write_text("not a page")
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
            again = await ask(engine, chat(0))
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 0
    lines = [record.getMessage() for record in caplog.records if "disk_cache_dir" in record.getMessage()]
    assert len(lines) == 2
    assert "1 files in" in lines[0]
    assert lines[1].endswith("is damaged; its page is computed again")


async def test_a_full_disk_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskPages, "write", Mock(side_effect=OSError(28, "No space left on device")))
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        await ask(engine, chat(0))
        await all_copied(engine)
        assert DiskPages.write.call_count > 5  # type: ignore[attr-defined]
    assert caplog.text.count("a page could not be written: [Errno 28] No space left on device") == 1


async def test_flushing_drops_the_files(tmp_path: Path) -> None:
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        await ask(engine, chat(0))
        await all_copied(engine)
        assert files(tmp_path)
        engine.flush_cache()
        await until(lambda: not files(tmp_path))
        assert engine.stats().disk_bytes == 0


async def test_files_are_bounded(tmp_path: Path) -> None:
    async with engine_with(disk_cache_dir=str(tmp_path), disk_cache_gib=0.002) as engine:
        await talk(engine, [chat(number) for number in range(4)])
        await all_copied(engine)
        size = engine.stats().disk_bytes
    on_disk = sum(path.stat().st_size for path in files(tmp_path))
    assert 0 < size <= 0.002 * 2**30
    assert on_disk == size


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"prefix_cache": False}, "host_cache_gib: without the prefix cache no pages are kept"),
        ({"host_cache_gib": 0, "disk_cache_dir": "/tmp/nowhere"}, "disk_cache_dir: .* set host_cache_gib"),
        ({"host_cache_gib": 2.0**19}, "host_cache_gib: .* leave too little"),
        ({"host_cache_gib": 1e-9}, "host_cache_gib: .* raise it"),
        ({"disk_cache_dir": "/proc/version"}, "disk_cache_dir: /proc/version"),
        ({"disk_cache_dir": "/tmp"}, "disk_cache_dir: /tmp: every user may write into the folder"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        async with engine_with(**knobs):
            raise AssertionError("it should not have started")
