"""Reads the files of images, within a bound. It blocks: use a thread."""

from __future__ import annotations

import os
from pathlib import Path

from aengine.images.header import bad_image

MAX_BYTES = 2**28  # of a file


def file_bytes(source: object) -> bytes:
    """Return the bytes of a file from its bytes or its path. Raises `InvalidRequestError`, without the path."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if not isinstance(source, (str, os.PathLike)):
        raise bad_image(f"is a {type(source).__name__}; give bytes, a path or an image of Pillow")
    path = Path(os.fsdecode(source))
    if not path.is_file():
        raise bad_image("is the path of no file; check the path")
    try:
        if path.stat().st_size <= MAX_BYTES:
            return path.read_bytes()
    except OSError:
        raise bad_image("is the path of a file that cannot be read; check its permissions") from None
    raise bad_image(f"is a file of more than {MAX_BYTES} bytes; save it smaller")
