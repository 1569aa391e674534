"""Pages on a disk: one file per page, named by its key and checked when it is read. The total size is bounded.

A file is a header (magic, key, length, CRC-32 of the contents) and the page's bytes, rank by rank. It is written under
another name and renamed when it is complete. A file belongs to the cache if its name and its header match; other files
in the folder are never changed, and links are never followed. The index is in memory and is used only by the event
loop. `write`, `read` and `delete` access only files and may run in any thread.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import secrets
import stat
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aengine.cache.tiers.keys import KEY_BYTES

log = logging.getLogger("aengine")

_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQI")
_MAGIC = b"aengkv\x00\x01"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_PAGE_FILE = re.compile(r"([0-9a-f]{64})\.(?:kv|[0-9a-f]+\.part)")  # a page, or an unfinished one
_PROCESS_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # errors of this process, not of the file


class FailureLog:
    """Logs a series of failures, such as those of a full disk: one line when it begins, and one when it ends."""

    def __init__(self, recovered: str) -> None:
        """recovered: the message to log when a series of several failures ends."""
        self._recovered = recovered
        self._failures = 0

    def failed(self, message: str, *arguments: object) -> None:
        """Log the first of several failures in a row, and count the others."""
        self._failures += 1
        if self._failures == 1:
            log.warning(message + "; further failures are counted until one succeeds", *arguments)

    def succeeded(self) -> None:
        """Note a success, which ends a series of failures."""
        if self._failures > 1:
            log.warning("%s, after %d failures", self._recovered, self._failures)
        self._failures = 0


class PageFileError(Exception):
    """A file is missing, or its contents differ from what was written."""


class DiskPages:
    """The keys of the pages in a folder, least recently used first, and their files."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Create the folder, readable only by its owner, and list its pages.

        Raises: OSError if that fails, or if other users may write to the folder.
        """
        self.folder = folder
        self.most_bytes = most_bytes
        self.bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # oldest use first
        self._undeleted = FailureLog("disk_cache_dir: files can be deleted again")
        self._run = secrets.token_hex(8)  # a random part of the names of this process's unfinished files
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(folder.stat())
        found, foreign = self._scan()
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self.bytes += size
        if foreign:
            log.warning("disk_cache_dir: %d files in %s are not cached pages; they are left alone", foreign, folder)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    # ---- the index ------------------------------------------------------------------------------------------

    def touch(self, key: bytes) -> None:
        """Make a page the most recently used one. Does nothing if there is no page with this key."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def add(self, key: bytes, size: int) -> list[bytes]:
        """Note a file of `size` bytes. Returns the keys of evicted pages; the caller deletes their files."""
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
        """Forget the page with this key, if there is one."""
        self.bytes -= self._sizes.pop(key, 0)

    def clear(self) -> list[bytes]:
        """Forget all pages. Returns the keys whose files have to be deleted."""
        gone = list(self._sizes)
        self._sizes.clear()
        self.bytes = 0
        return gone

    # ---- the files ------------------------------------------------------------------------------------------

    def write(self, key: bytes, parts: Sequence[memoryview]) -> int:
        """Write a page, and return the size of its file. Raises `OSError` on failure, and then leaves no file."""
        name, unfinished = _name(key), f"{key.hex()}.{self._run}.part"
        length, checksum = _sum(parts)
        with self._folder_of(key, make=True) as folder:
            if _exists(folder, name) and not _is_own(folder, name, key):
                raise FileExistsError(
                    errno.EEXIST, f"{self.folder / name[:2] / name} is not a cached page; it is left alone"
                )
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "wb", buffering=0) as file:
                    for part in (memoryview(_HEADER.pack(_MAGIC, key, length, checksum)), *parts):
                        _write_all(file.fileno(), part)
                os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(unfinished, dir_fd=folder)
                raise
        return _HEADER.size + length

    def read(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Read a page into memory of the same size, and mark the file as used.

        Raises `PageFileError` if the file can never be used, and `OSError` if this process lacks descriptors or memory.
        """
        path = self.folder / key.hex()[:2] / _name(key)
        try:
            with self._folder_of(key) as folder, _opened(folder, path.name) as file:
                header = file.read(_HEADER.size)
                if len(header) != _HEADER.size:
                    raise PageFileError(f"{path} is cut short")
                magic, named, length, checksum = _HEADER.unpack(header)
                wanted = sum(map(len, parts))
                if magic != _MAGIC or named != key or length != wanted:
                    raise PageFileError(f"{path} does not hold a page of {wanted} bytes with that key")
                for part in parts:
                    _read_all(file.fileno(), part, path)
                if _sum(parts)[1] != checksum or file.read(1):
                    raise PageFileError(f"{path} is damaged")
                with suppress(OSError):  # a read-only disk does not keep the order of use
                    os.utime(file.fileno())
        except OSError as error:
            if error.errno in _PROCESS_LIMITS:
                raise
            raise PageFileError(f"{path}: {error.strerror}") from error

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete files, if they still exist."""
        for key in keys:
            name = _name(key)
            try:
                with self._folder_of(key) as folder:
                    if _is_own(folder, name, key):
                        os.unlink(name, dir_fd=folder)
                        self._undeleted.succeeded()
            except FileNotFoundError:
                pass
            except OSError as error:
                self._undeleted.failed("disk_cache_dir: %s cannot be deleted: %s", self.folder / name, error.strerror)

    @contextmanager
    def _folder_of(self, key: bytes, make: bool = False) -> Iterator[int]:
        """Open the folder of a key's file as a descriptor. Raises `OSError` as `_own_folder` does."""
        path = self.folder / key.hex()[:2]
        if make:
            path.mkdir(mode=0o700, exist_ok=True)
        with _own_folder(path) as descriptor:
            yield descriptor

    def _scan(self) -> tuple[list[tuple[float, bytes, int]], int]:
        """Return time of last use, key and size of each page, and the number of other files.

        Deletes unfinished files.
        """
        found, foreign = [], 0
        for path in sorted(self.folder.iterdir()):
            try:
                if not _FOLDER.fullmatch(path.name):
                    raise NotADirectoryError
                with _own_folder(path) as folder, os.scandir(folder) as entries:
                    for entry in entries:
                        match = _PAGE_FILE.fullmatch(entry.name)
                        if match is None or match[1][:2] != path.name or not entry.is_file(follow_symlinks=False):
                            foreign += 1
                            continue
                        key = bytes.fromhex(match[1])
                        if entry.name == _name(key):
                            facts = entry.stat(follow_symlinks=False)
                            found.append((facts.st_mtime, key, facts.st_size))
                        elif _is_own(folder, entry.name, key):
                            with suppress(OSError):
                                os.unlink(entry.name, dir_fd=folder)
                        else:
                            foreign += 1
            except OSError:
                foreign += 1
        return found, foreign


def _name(key: bytes) -> str:
    return f"{key.hex()}.kv"


def _refuse_shared(facts: os.stat_result) -> None:
    """Raise `OSError` if another user may write to the folder, because forged pages look like real ones."""
    if facts.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            errno.EPERM, f"the folder belongs to another user (uid {facts.st_uid}); give one of the server's own user"
        )
    if facts.st_mode & stat.S_IWOTH:
        raise PermissionError(
            errno.EPERM, "every user may write into the folder; give one with mode 700, such as a new one in it"
        )


@contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """Open a folder as a descriptor. Raises `OSError` for a link, or if other users may write to it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _refuse_shared(os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _opened(folder: int, name: str) -> Iterator[io.FileIO]:
    """Open a file for reading. Raises `OSError` for links, and for pipes and devices, which could block."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with io.FileIO(descriptor, closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_own(folder: int, name: str, key: bytes) -> bool:
    """Return whether a file begins like a page with this key. A file may be shorter, if writing was interrupted."""
    own = _MAGIC + key
    try:
        with _opened(folder, name) as file:
            return own.startswith(file.read(len(own)))
    except OSError:
        return False


def _sum(parts: Sequence[memoryview]) -> tuple[int, int]:
    """Return the length and the CRC-32 of all parts together."""
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
