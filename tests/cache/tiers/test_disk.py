"""Files of pages: complete or absent, bounded, and never confused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from aengine.cache.tiers.disk import DiskPages, PageFileError

KEYS = [bytes([number]) * 32 for number in range(1, 6)]
DATA = bytes(range(200))


def parts() -> list[memoryview]:
    """Return memory for a page of two ranks."""
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
    with pytest.raises(PageFileError, match="does not hold a page of 120 bytes"):
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


def header_of(key: bytes) -> bytes:
    return b"aengkv\x00\x01" + key


def test_what_was_never_finished_is_cleared_up_and_foreign_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskPages(tmp_path, 10_000)
    store(disk, KEYS[0])
    folder = path_of(disk, KEYS[0]).parent
    name = KEYS[0].hex()
    unfinished = [folder / f"{name}.77.part", folder / f"{name}.{'ab' * 8}.part", folder / f"{name}.0.part"]
    for path, size in zip(unfinished, (100, 30, 0), strict=True):
        path.write_bytes((header_of(KEYS[0]) + bytes(60))[:size])
    (tmp_path / "01.old").mkdir()
    foreign = [
        folder / "notes.kv",
        folder / f"{KEYS[1].hex()}.kv",
        folder / "thesis.part",
        folder / f"{name}.78.part",
        tmp_path / "01.old" / f"{name}.79.part",
        tmp_path / "readme",
    ]
    for path in foreign:
        path.write_bytes(header_of(KEYS[2]))
    disk = DiskPages(tmp_path, 10_000)
    assert len(disk) == 1
    assert not any(path.exists() for path in unfinished)
    assert all(path.exists() for path in foreign)
    assert "6 files in" in caplog.text


def test_a_foreign_file_of_a_pages_name_is_neither_deleted_nor_replaced(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 10_000)
    store(disk, KEYS[0])
    file = path_of(disk, KEYS[0])
    file.write_bytes(b"a letter")
    with pytest.raises(FileExistsError, match="is not a cached page"):
        disk.write(KEYS[0], [memoryview(DATA)])
    disk.delete([KEYS[0]])
    assert [file.read_bytes(), *file.parent.iterdir()] == [b"a letter", file]
    file.write_bytes(b"")  # as after a loss of power
    store(disk, KEYS[0])
    disk.read(KEYS[0], parts())


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    disk = DiskPages(tmp_path / "kv", 10_000)
    (disk.folder / KEYS[0].hex()[:2]).symlink_to(outside)
    with pytest.raises(OSError, match="directory"):
        store(disk, KEYS[0])
    (outside / f"{KEYS[0].hex()}.77.part").write_bytes(header_of(KEYS[0]))
    (outside / f"{KEYS[0].hex()}.kv").write_bytes(header_of(KEYS[0]))
    assert len(DiskPages(disk.folder, 10_000)) == 0
    with pytest.raises(PageFileError):
        disk.read(KEYS[0], parts())
    disk.delete([KEYS[0]])
    assert len(list(outside.iterdir())) == 2


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_pipes_and_folders_are_refused_and_stay(tmp_path: Path, make: Callable[[Path], None]) -> None:
    disk = DiskPages(tmp_path, 10_000)
    store(disk, KEYS[0])
    file = path_of(disk, KEYS[0])
    file.unlink()
    make(file)
    with pytest.raises(PageFileError, match="not a regular file"):
        disk.read(KEYS[0], parts())
    with pytest.raises(FileExistsError):
        disk.write(KEYS[0], [memoryview(DATA)])
    disk.delete([KEYS[0]])
    assert file.exists()


def test_a_folder_that_others_may_write_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskPages(tmp_path / "kv", 10_000)
    store(disk, KEYS[0])
    inside = path_of(disk, KEYS[0]).parent
    inside.chmod(0o777)
    with pytest.raises(PageFileError, match="every user may write"):
        disk.read(KEYS[0], parts())
    assert len(DiskPages(disk.folder, 10_000)) == 0
    inside.chmod(0o700)
    disk.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="every user may write into the folder"):
        DiskPages(disk.folder, 10_000)
    disk.folder.chmod(0o700)
    os.chown(disk.folder, 1 if os.geteuid() == 0 else -1, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 2)
    with pytest.raises(PermissionError, match="belongs to another user"):
        DiskPages(disk.folder, 10_000)


def test_a_sound_page_on_a_read_only_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskPages(tmp_path, 10_000)
    store(disk, KEYS[0])

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    disk.read(KEYS[0], parts())


def test_files_that_cannot_be_deleted_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskPages(tmp_path, 10_000)
    for key in KEYS:
        store(disk, key)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        disk.delete(KEYS[:4])
    assert caplog.text.count("cannot be deleted: Read-only file system") == 1
    disk.delete(KEYS)
    assert "after 4 failures" in caplog.text


def test_a_reader_without_descriptors_takes_no_page_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskPages(tmp_path, 10_000)
    store(disk, KEYS[0])
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(OSError, match="Too many open files"):
        disk.read(KEYS[0], parts())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskPages(tmp_path, 10_000)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        disk.write(KEYS[0], [memoryview(DATA)])
    monkeypatch.undo()
    assert not list(tmp_path.glob("*/*"))
