"""Pages as files: one each, named by its key, checked when it is read, bounded in number by their bytes.

A file is a header (magic, key, length, CRC-32 of the contents) and the page's bytes, rank by rank. It appears under its
name at once and whole. Whatever else lies in the folder is left alone. The index lives in memory and belongs to the
event loop; `write`, `read` and `delete` touch files alone and may run in any thread.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from aengine.cache.tiers.keys import KEY_BYTES

log = logging.getLogger("aengine")

_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQI")
_MAGIC = b"aengkv\x00\x01"
_SUFFIX = ".kv"
_UNFINISHED = ".part"


class PageFileError(Exception):
    """A file is missing, or not what was written under its key."""


class DiskPages:
    """The keys of the pages in a folder, least recently used first, and their files."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Make the folder, for its owner's eyes only, and list what is there. Raises `OSError`."""
        self.folder = folder
        self.most_bytes = most_bytes
        self.bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # oldest use first
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found, foreign = self._scan()
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self.bytes += size
        if foreign:
            log.warning("disk_cache_dir: %d files in %s are no cached pages, and stay as they are", foreign, folder)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    # ---- the index ------------------------------------------------------------------------------------------

    def touch(self, key: bytes) -> None:
        """Make a page, if it is there, the most recently used one."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def add(self, key: bytes, size: int) -> list[bytes]:
        """A file of so many bytes was written. Returns the keys whose files have to go for it, forgotten already."""
        self.drop(key)
        self._sizes[key] = size
        self.bytes += size
        gone = []
        while self.bytes > self.most_bytes:
            oldest = next(iter(self._sizes))
            self.drop(oldest)
            gone.append(oldest)
        return gone

    def drop(self, key: bytes) -> None:
        """Forget a page, if it is there."""
        self.bytes -= self._sizes.pop(key, 0)

    def clear(self) -> list[bytes]:
        """Forget all pages; returns the keys whose files have to go."""
        gone = list(self._sizes)
        self._sizes.clear()
        self.bytes = 0
        return gone

    # ---- the files ------------------------------------------------------------------------------------------

    def write(self, key: bytes, parts: Sequence[memoryview]) -> int:
        """Write a page, and return the bytes that its file has. Raises `OSError`, and leaves nothing then."""
        path = self._path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}{_UNFINISHED}")
        length, checksum = _sum(parts)
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                for part in (memoryview(_HEADER.pack(_MAGIC, key, length, checksum)), *parts):
                    _write_all(file.fileno(), part)
            os.replace(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return _HEADER.size + length

    def read(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Read a page into memory of its size, and mark it as used. Raises `PageFileError`."""
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            with open(descriptor, "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                if len(header) != _HEADER.size:
                    raise PageFileError(f"{path} is cut short")
                magic, named, length, checksum = _HEADER.unpack(header)
                wanted = sum(map(len, parts))
                if magic != _MAGIC or named != key or length != wanted:
                    raise PageFileError(f"{path} holds something else than a page of {wanted} bytes with that key")
                for part in parts:
                    _read_all(file.fileno(), part, path)
                if _sum(parts)[1] != checksum or file.read(1):
                    raise PageFileError(f"{path} is damaged")
            os.utime(path)  # the order in which a later start finds them
        except OSError as error:
            raise PageFileError(f"{path}: {error.strerror}") from error

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete files, those that there still are."""
        for key in keys:
            try:
                self._path(key).unlink(missing_ok=True)
            except OSError as error:
                log.warning("disk_cache_dir: %s", error)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}{_SUFFIX}"

    def _scan(self) -> tuple[list[tuple[float, bytes, int]], int]:
        """Time of last use, key and size of each page; how many files are none. Clears up what was never finished."""
        found, foreign = [], 0
        for folder in sorted(self.folder.iterdir()):
            if folder.is_symlink() or not folder.is_dir():
                foreign += 1
                continue
            for entry in os.scandir(folder):
                if entry.name.endswith(_UNFINISHED):
                    Path(entry.path).unlink(missing_ok=True)
                elif (key := _key_of(entry.name, folder.name)) is None or not entry.is_file(follow_symlinks=False):
                    foreign += 1
                else:
                    facts = entry.stat(follow_symlinks=False)
                    found.append((facts.st_mtime, key, facts.st_size))
        return found, foreign


def _key_of(name: str, folder: str) -> bytes | None:
    stem = name.removesuffix(_SUFFIX)
    if stem == name or len(stem) != 2 * KEY_BYTES or not stem.startswith(folder) or len(folder) != 2:
        return None
    try:
        return bytes.fromhex(stem) if stem == stem.lower() else None
    except ValueError:
        return None


def _sum(parts: Sequence[memoryview]) -> tuple[int, int]:
    """Length and CRC-32 of all parts together."""
    length = checksum = 0
    for part in parts:
        length += len(part)
        checksum = zlib.crc32(part, checksum)
    return length, checksum


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def _read_all(descriptor: int, part: memoryview, path: Path) -> None:
    while part:
        count = os.readv(descriptor, [part])
        if not count:
            raise PageFileError(f"{path} is cut short")
        part = part[count:]
