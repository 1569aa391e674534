"""Files of pages: whole or not there, bounded, and never mistaken for another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aengine.cache.tiers.disk import DiskPages, PageFileError

KEYS = [bytes([number]) * 32 for number in range(1, 6)]
DATA = bytes(range(200))


def parts() -> list[memoryview]:
    """Room for a page of two ranks."""
    return [memoryview(bytearray(120)), memoryview(bytearray(80))]


def store(disk: DiskPages, key: bytes, data: bytes = DATA) -> int:
    size = disk.write(key, [memoryview(data[:120]), memoryview(data[120:])])
    disk.delete(disk.add(key, size))
    return size


def path_of(disk: DiskPages, key: bytes) -> Path:
    return disk.folder / key.hex()[:2] / f"{key.hex()}.kv"


def test_what_was_written_is_read_after_a_restart(tmp_path: Path) -> None:
    store(DiskPages(tmp_path / "kv", 10_000), KEYS[0])
    disk = DiskPages(tmp_path / "kv", 10_000)
    assert KEYS[0] in disk
    assert len(disk) == 1
    room = parts()
    disk.read(KEYS[0], room)
    assert b"".join(room) == DATA


def test_only_the_owner_sees_them(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path / "kv", 10_000)
    store(disk, KEYS[0])
    file = path_of(disk, KEYS[0])
    assert [oct(path.stat().st_mode & 0o777) for path in (disk.folder, file.parent, file)] == [
        "0o700",
        "0o700",
        "0o600",
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"x" + data[1:],
        lambda data: data[:8] + KEYS[1] + data[40:],
    ],
    ids=["short", "header alone", "empty", "long", "flipped", "magic", "another key"],
)
def test_what_is_not_what_was_written_is_refused(tmp_path: Path, damage: object) -> None:
    disk = DiskPages(tmp_path, 10_000)
    store(disk, KEYS[0])
    file = path_of(disk, KEYS[0])
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(PageFileError):
        disk.read(KEYS[0], parts())


def test_a_page_of_another_size_is_refused(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 10_000)
    store(disk, KEYS[0])
    with pytest.raises(PageFileError, match="something else than a page of 120 bytes"):
        disk.read(KEYS[0], parts()[:1])


def test_a_missing_file_and_a_link_are_refused(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path / "kv", 10_000)
    store(disk, KEYS[0])
    file = path_of(disk, KEYS[0])
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(PageFileError):
        disk.read(KEYS[0], parts())
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PageFileError):
        disk.read(KEYS[0], parts())
    assert KEYS[0] not in DiskPages(tmp_path / "kv", 10_000)


def test_the_least_recently_used_files_go(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 10_000)
    size = store(disk, KEYS[0])
    disk = DiskPages(tmp_path, 3 * size)
    for key in KEYS[1:3]:
        store(disk, key)
    disk.touch(KEYS[0])
    store(disk, KEYS[3])
    assert [key in disk for key in KEYS[:4]] == [True, False, True, True]
    assert [path_of(disk, key).exists() for key in KEYS[:4]] == [True, False, True, True]
    assert disk.bytes == 3 * size


def test_a_restart_keeps_the_order_of_use(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 10_000)
    size = store(disk, KEYS[0])
    store(disk, KEYS[1])
    for moment, key in enumerate(KEYS[:2]):
        os.utime(path_of(disk, key), (1000 + moment, 1000 + moment))
    disk.read(KEYS[0], parts())
    disk = DiskPages(tmp_path, 2 * size)
    store(disk, KEYS[2])
    assert [key in disk for key in KEYS[:3]] == [True, False, True]


def test_what_was_never_finished_is_cleared_up_and_foreign_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskPages(tmp_path, 10_000)
    store(disk, KEYS[0])
    folder = path_of(disk, KEYS[0]).parent
    unfinished = folder / f"{KEYS[0].hex()}.77.part"
    foreign = [folder / "notes.kv", folder / f"{KEYS[1].hex()}.kv", tmp_path / "readme"]
    for path in (unfinished, *foreign):
        path.write_bytes(b"something")
    disk = DiskPages(tmp_path, 10_000)
    assert len(disk) == 1
    assert not unfinished.exists()
    assert all(path.exists() for path in foreign)
    assert "3 files in" in caplog.text


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskPages(tmp_path, 10_000)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        disk.write(KEYS[0], [memoryview(DATA)])
    monkeypatch.undo()
    assert not list(tmp_path.glob("*/*"))
