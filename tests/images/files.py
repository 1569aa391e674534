"""Small images as the bytes of files."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WebP", "GIF")


def scene(width: int = 37, height: int = 23) -> Image.Image:
    """Return a picture whose four corners differ."""
    rows, columns = np.mgrid[0:height, 0:width]
    red, green = rows * 255 // max(height - 1, 1), columns * 255 // max(width - 1, 1)
    return Image.fromarray(np.stack((red, green, (red + green) // 3), axis=2).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return an image as the bytes of a file. JPEG and WebP lose little."""
    file = BytesIO()
    more: dict[str, object] = {"JPEG": {"quality": 95}, "WebP": {"lossless": True}}.get(kind, {})
    image.save(file, kind, **{**more, **options})  # type: ignore[arg-type]
    return file.getvalue()


def with_orientation(image: Image.Image, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def jpeg_segment(marker: int, data: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data


def png_that_claims(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that claims any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + png_chunk(b"IEND", b"")
    )
