"""Reads the format and the size of an image from its own bytes. Nothing is decoded, and no memory is allocated.

The four formats are read by our own code, so that a file that claims an enormous size never reaches a decoder. Neither
do texts, profiles and junk: Pillow reads them in Python, which takes minutes for some files of a few megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from aengine.errors import InvalidRequestError

ImageFormat = Literal["PNG", "JPEG", "WebP", "GIF"]
# Values of EXIF's orientation that exchange width and height.
SIDEWAYS = (5, 6, 7, 8)
ORIENTATION = 0x0112  # EXIF's tag
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_MAX_PARTS = 2**16  # of a file; each takes time, and no real file has nearly as many
_SLICE = 2**20  # bytes; searching them takes up to 6 ms
# Of a WebP. Pillow copies its pixels once without letting other threads run, which takes 40 ms for as many.
_MAX_WEBP_PIXELS = 2**24
_MAX_SCANS = 2**31  # scans of a JPEG times pixels; each scan may change all of them


@dataclass(frozen=True, slots=True)
class Header:
    """What an image says about itself."""

    format: ImageFormat
    stored: tuple[int, int]  # width and height of the stored pixels
    orientation: int = 1  # EXIF's, 1 to 8: how the stored pixels are turned and mirrored to be seen
    pieces: tuple[slice, ...] = (slice(None),)  # of the file, which its pixels depend on

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image as it is seen."""
        width, height = self.stored
        return (height, width) if self.orientation in SIDEWAYS else (width, height)


def read_header(data: bytes, max_pixels: int) -> Header:
    """Return the header of a PNG, JPEG, WebP or GIF.

    Raises `InvalidRequestError` for other files, for damaged ones, and for those of more than `max_pixels` pixels. A
    WebP has a lower limit.
    """
    if not data:
        raise bad_image("is empty; send the bytes of a file")
    reader = next((reader for start, reader in _READERS if data.startswith(start)), None)
    if reader is None or (reader is _webp and data[8:12] != b"WEBP"):
        raise bad_image("is no PNG, JPEG, WebP or GIF; convert it to one of these")
    try:
        header = reader(data)
    except IndexError:
        header = None
    if header is None:
        raise bad_image("is damaged or incomplete: it has no size; send the whole file")
    width, height = header.stored
    if not width or not height:
        raise bad_image(f"is {width} x {height} pixels; send one with pixels")
    if header.format == "WebP":
        max_pixels = min(max_pixels, _MAX_WEBP_PIXELS)
    if width * height > max_pixels:
        of_format = " for a WebP" if max_pixels == _MAX_WEBP_PIXELS else ""
        raise bad_image(f"has {width} x {height} pixels, more than {max_pixels}{of_format}; make it smaller")
    return header


def bad_image(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"image: {what}", "image")


def _png(data: bytes) -> Header | None:
    size, orientation, turned = None, 0, 0
    pieces = [slice(8)]
    at, parts = 8, 0
    while at + 8 <= len(data):
        parts = _count(parts)
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = at + 8
        if kind == b"IHDR" and length == 13 and size is None:
            size = _number(data, body, 4), _number(data, body + 4, 4)
        elif size is None:  # it must be the first
            return None
        elif kind == b"eXIf":
            orientation = orientation or _orientation(data[body : body + length])
        elif kind == b"iTXt" and data.startswith(_PNG_XMP, body):
            turned = turned or _xmp_orientation(data[body : body + length])
        if kind in _PNG_PIXELS:
            pieces.append(slice(at, body + length + 4))
        if kind == b"IEND":
            break
        at = body + length + 4
    return None if size is None else Header("PNG", size, orientation or turned or 1, tuple(pieces))


_PNG_PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")  # an animation has its first frame in them
_PNG_XMP = b"XML:com.adobe.xmp\0"


def _jpeg(data: bytes) -> Header | None:
    size, orientation, turned, scans, parts = None, 0, 0, 0, 0
    pieces = [slice(2)]
    for marker, place in _segments(data):
        parts = _count(parts)
        segment = data[place.start + 4 : place.stop]
        if marker in _FRAMES:
            size = _number(segment, 3, 2), _number(segment, 1, 2)
        elif marker == 0xDA:
            if not scans:
                pieces.append(slice(place.start, None))
            scans += 1
        elif not scans and marker == 0xE1:
            if segment.startswith(_EXIF):
                orientation = orientation or _orientation(segment)
            elif segment.startswith(_JPEG_XMP):
                turned = turned or _xmp_orientation(segment)
        if not scans and marker not in _JPEG_TEXTS:
            pieces.append(place)
    if size is None:
        return None
    if scans * size[0] * size[1] > _MAX_SCANS:
        raise bad_image(f"is a JPEG of {scans} scans, which takes too long to decode; save it again")
    return Header("JPEG", size, orientation or turned or 1, tuple(pieces))


_EXIF = b"Exif\0\0"
_JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
# Comments, and what programs add, except JFIF's and Adobe's segments: they say which colours the numbers are.
_JPEG_TEXTS = frozenset(range(0xE1, 0xF0)) - {0xEE} | {0xFE}
# Markers that start with the size of the frame: all of 0xC0 to 0xCF but tables and arithmetic conditions.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers with a segment, and the end of the image.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)


def _segments(data: bytes) -> Iterator[tuple[int, slice]]:
    """Yield the markers of a JPEG and the places of their segments, up to the end of the first image."""
    at = 2
    while (found := _next_marker(data, at)) is not None:  # skips the compressed data of a scan, too
        marker, at = data[found.end() - 1], found.end()
        if marker == 0xD9:
            return
        length = _number(data, at, 2)
        yield marker, slice(found.start(), at + length)
        at += max(length, 2)


def _next_marker(data: bytes, at: int) -> re.Match[bytes] | None:
    """Search in slices, because a search does not let other threads run."""
    for start in range(at, len(data), _SLICE):
        if (found := _MARKER.search(data, start, start + _SLICE + 1)) is not None:
            return found
    return None


def _webp(data: bytes) -> Header | None:
    size, orientation, turned = None, 0, 0
    at, parts = 12, 0
    while at + 8 <= len(data):
        parts = _count(parts)
        kind, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        body = at + 8
        if size is None:
            size = _webp_size(data, kind, body)
            if size is None:
                return None
            if kind != b"VP8X":  # there are no other parts
                break
        elif kind == b"EXIF":
            orientation = orientation or _orientation(data[body : body + length])
        elif kind == b"XMP ":
            turned = turned or _xmp_orientation(data[body : body + length])
        at = body + length + length % 2
    return None if size is None else Header("WebP", size, orientation or turned or 1)


def _webp_size(data: bytes, kind: bytes, body: int) -> tuple[int, int] | None:
    """Return the size of the canvas from the first part of a WebP."""
    if kind == b"VP8X":
        return 1 + _number(data, body + 4, 3, "little"), 1 + _number(data, body + 7, 3, "little")
    if kind == b"VP8L":
        bits = _number(data, body + 1, 4, "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[body + 3 : body + 6] == b"\x9d\x01\x2a":
        return _number(data, body + 6, 2, "little") & 0x3FFF, _number(data, body + 8, 2, "little") & 0x3FFF
    return None


def _gif(data: bytes) -> Header:
    size = _number(data, 6, 2, "little"), _number(data, 8, 2, "little")
    flags = _number(data, 10, 1)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)  # after the palette
    pieces, parts = [slice(at)], 0
    while at < len(data) and data[at] != 0x2C:  # the first frame
        parts = _count(parts)
        begin, at = at, at + 1
        if data[begin] == 0x21:
            kind, at = _number(data, at, 1), at + 1
            while length := _number(data, at, 1):
                parts = _count(parts)
                at += 1 + length
            at += 1
            if kind == 0xF9:  # says which colour is transparent
                pieces.append(slice(begin, at))
    return Header("GIF", size, 1, (*pieces, slice(at, None)))


_READERS = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"RIFF", _webp),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
)


def _count(parts: int) -> int:
    """Return one part more. Raises `InvalidRequestError` if there are too many."""
    if parts == _MAX_PARTS:
        raise bad_image(f"is a file of more than {_MAX_PARTS} parts; save it again")
    return parts + 1


def _orientation(exif: bytes) -> int:
    """Return the orientation that EXIF data has, or 0."""
    exif = exif.removeprefix(_EXIF)
    order: Literal["little", "big"] = "little" if exif[:2] == b"II" else "big"
    try:
        at = _number(exif, 4, 4, order)
        for entry in range(_number(exif, at, 2, order)):
            start = at + 2 + 12 * entry
            if _number(exif, start, 2, order) == ORIENTATION:
                length = _INTEGERS.get(_number(exif, start + 2, 2, order), 0)
                value = _number(exif, start + 8, length, order)
                return value if 1 <= value <= 8 else 1
    except IndexError:
        pass
    return 0


_INTEGERS = {3: 2, 4: 4}  # EXIF's types, and their bytes


def _xmp_orientation(xmp: bytes) -> int:
    """Return the orientation that the text of XMP has, or 0. It counts if there is none in EXIF data."""
    found = _XMP_ORIENTATION.search(xmp, 0, _SLICE)
    return 0 if found is None else int(found[1])


def _number(data: bytes, at: int, length: int, order: Literal["little", "big"] = "big") -> int:
    """Return an integer of some bytes. Raises IndexError if they are not there."""
    if at + length > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + length], order)
