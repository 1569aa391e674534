"""Formats and sizes are read from a file's own bytes, before anything is decoded."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import pytest
from PIL import Image, ImageOps

from aengine.errors import InvalidRequestError
from aengine.images import header
from aengine.images.header import read_header
from tests.images.files import (
    FORMATS,
    encoded,
    jpeg_segment,
    png_chunk,
    png_that_claims,
    scene,
    with_orientation,
)

MANY = 2**26


@pytest.mark.parametrize("size", [(37, 23), (1, 1), (1, 400), (301, 2)])
@pytest.mark.parametrize("kind", FORMATS)
def test_format_and_size(kind: str, size: tuple[int, int]) -> None:
    header = read_header(encoded(scene(*size), kind), MANY)
    assert (header.format, header.size, header.orientation) == (kind, size, 1)


@pytest.mark.parametrize(
    "options", [{"lossless": False}, {"lossless": True}, {"lossless": False, "exif": Image.Exif().tobytes()}]
)
def test_each_kind_of_webp(options: dict[str, object]) -> None:
    for image in (scene(), scene().convert("RGBA")):
        image.putpixel((0, 0), (1, 2, 3, 4)[: len(image.getbands())])
        assert read_header(encoded(image, "WebP", **options), MANY).size == (37, 23)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP"])
def test_a_turned_image_has_the_size_that_is_seen(kind: str, orientation: int) -> None:
    header = read_header(with_orientation(scene(), kind, orientation), MANY)
    assert header.orientation == orientation
    assert header.size == ((23, 37) if orientation > 4 else (37, 23))


@pytest.mark.parametrize("order", ["<", ">"])
def test_both_byte_orders_of_exif(order: str) -> None:
    exif = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)
    data = encoded(scene(), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif
    assert read_header(data[:2] + segment + data[2:], MANY).orientation == 6


@pytest.mark.parametrize(("kind", "value", "seen"), [(4, b"\0\0\0\x06", 6), (1, b"\6\0\0\0", 1), (2, b"6\0\0\0", 1)])
def test_types_of_exif_are_read_as_pillow_reads_them(kind: int, value: bytes, seen: int) -> None:
    exif = b"MM\0*" + struct.pack(">IHHHI", 8, 1, 0x0112, kind, 1) + value + bytes(4)
    data = encoded(scene(), "JPEG")
    data = data[:2] + jpeg_segment(0xE1, b"Exif\0\0" + exif) + data[2:]
    assert read_header(data, MANY).size == ImageOps.exif_transpose(Image.open(BytesIO(data))).size
    assert read_header(data, MANY).orientation == seen


def as_xmp(orientation: str) -> bytes:
    return f"<x:xmpmeta><rdf:Description tiff:Orientation{orientation}/></x:xmpmeta>".encode()


@pytest.mark.parametrize("xmp", [as_xmp('="6"'), as_xmp(">6</tiff:Orientation"), as_xmp('="0"'), as_xmp('="9"'), b"<x"])
@pytest.mark.parametrize("exif", [None, 1, 3])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP"])
def test_xmp_turns_an_image_without_exif_as_in_pillow(kind: str, exif: int | None, xmp: bytes) -> None:
    data = encoded(scene(), kind) if exif is None else with_orientation(scene(), kind, exif)
    if kind == "PNG":
        data = data[:33] + png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp) + data[33:]
    elif kind == "JPEG":
        data = data[:2] + jpeg_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp) + data[2:]
    else:
        options: dict[str, object] = {} if exif is None else {"exif": Image.open(BytesIO(data)).getexif()}
        data = encoded(scene(), kind, xmp=xmp, **options)
    expected = Image.open(BytesIO(data)).getexif().get(0x0112, 1)
    assert read_header(data, MANY).orientation == (expected if 1 <= expected <= 8 else 1)


@pytest.mark.parametrize("exif", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff", b"II*\0" * 99])
def test_damaged_exif_leaves_an_image_as_it_is_stored(exif: bytes) -> None:
    data = encoded(scene(), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif
    assert read_header(data[:2] + segment + data[2:], MANY).orientation == 1


def test_a_thumbnail_within_a_jpeg_is_not_its_size() -> None:
    data, small = encoded(scene(), "JPEG"), encoded(scene(8, 8), "JPEG")
    segment = b"\xff\xe2" + struct.pack(">H", len(small) + 2) + small
    assert read_header(data[:2] + segment + data[2:] + small, MANY).size == (37, 23)


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0",
        b"BM" + bytes(60),
        b"II*\0" + bytes(60),
        b"RIFF\x24\0\0\0WAVEfmt ",
        b"\0\0\0\x0cjP  \r\n\x87\n",
        b"GIF88a" + bytes(60),
        b"just text",
    ],
)
def test_other_files_are_refused_whatever_they_are(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="is no PNG, JPEG, WebP or GIF; convert it"):
        read_header(data, MANY)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="is empty"):
        read_header(b"", MANY)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_anywhere_in_its_header_is_refused_or_has_its_size(kind: str) -> None:
    data = encoded(scene(), kind)
    for length in range(1, min(len(data), 800)):
        try:
            assert read_header(data[:length], MANY).size == (37, 23)
        except InvalidRequestError as error:
            assert str(error).startswith("image: is ")  # noqa: PT017


@pytest.mark.parametrize("kind", FORMATS)
def test_any_changed_byte_gives_a_header_or_a_refusal(kind: str) -> None:
    data = encoded(scene(), kind)
    for at in range(min(len(data), 300)):
        for value in (0, 0x7F, 0xFF):
            try:
                read_header(data[:at] + bytes([value]) + data[at + 1 :], MANY)
            except InvalidRequestError as error:
                assert str(error).startswith("image: ")  # noqa: PT017


def test_a_file_that_claims_an_enormous_size_is_refused_by_its_header() -> None:
    with pytest.raises(InvalidRequestError, match=r"65535 x 65535 pixels, more than 67108864; make it smaller"):
        read_header(png_that_claims(65535, 65535), MANY)
    with pytest.raises(InvalidRequestError, match="0 x 5 pixels"):
        read_header(png_that_claims(0, 5), MANY)
    assert read_header(png_that_claims(8192, 8192), MANY).size == (8192, 8192)


def test_a_webp_has_a_lower_limit() -> None:
    """Pillow copies the pixels of a WebP while no other thread runs."""
    data = bytearray(encoded(scene(), "WebP", lossless=False, exif=Image.Exif().tobytes()))
    at = data.index(b"VP8X") + 12
    data[at : at + 6] = (4095).to_bytes(3, "little") * 2
    assert read_header(bytes(data), MANY).size == (4096, 4096)
    data[at : at + 3] = (4096).to_bytes(3, "little")
    with pytest.raises(InvalidRequestError, match=r"has 4097 x 4096 pixels, more than 16777216 for a WebP; make it sm"):
        read_header(bytes(data), MANY)
    with pytest.raises(InvalidRequestError, match=r"more than 5000; make it smaller"):
        read_header(bytes(data), 5000)


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    image = bytearray(encoded(scene(), "JPEG", progressive=True))
    frame = image.index(b"\xff\xc2")
    image[frame + 5 : frame + 9] = struct.pack(">HH", 3000, 4000)
    assert read_header(bytes(image), MANY).size == (4000, 3000)
    scan = image.index(b"\xff\xda")
    with pytest.raises(InvalidRequestError, match=r"2\d\d scans, which takes too long"):
        read_header(bytes(image[:-2] + image[scan : scan + 14] * 200), MANY)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("PNG", png_chunk(b"teXt", b"")),
        ("JPEG", b"\xff\xfe\0\2"),
        ("WebP", b"VP8X\x0a\0\0\0" + bytes(10)),
        ("GIF", b"!\xfe\1a\0"),
        ("GIF", b"\1"),
    ],
)
def test_a_file_of_very_many_parts_is_refused_quickly(kind: str, part: bytes) -> None:
    data = encoded(scene(), kind)
    start = {"PNG": 33, "JPEG": 2, "WebP": 12, "GIF": 13 + 768}[kind]
    with pytest.raises(InvalidRequestError, match="more than 65536 parts"):
        read_header(data[:start] + part * 70_000 + data[start:], MANY)


def test_a_comment_of_very_many_blocks_is_refused() -> None:
    data = encoded(scene(), "GIF")
    with pytest.raises(InvalidRequestError, match="more than 65536 parts"):
        read_header(data[:781] + b"!\xfe" + b"\1a" * 70_000 + b"\0" + data[781:], MANY)


# What Pillow would read in Python, or decompress, before it decodes anything.
USELESS = {
    "PNG": [
        png_chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(9000))),
        png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(9000))),
        png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x/>"),
        png_chunk(b"eXIf", b"MM\0*"),
        png_chunk(b"acTL", bytes(8)),
    ],
    "JPEG": [
        *(jpeg_segment(marker, b"Exif\0\0" + bytes(90)) for marker in (*range(0xE1, 0xEE), 0xEF, 0xFE)),
        b"\xff" * 90,
        b"\xff\0" * 90,
    ],
    "WebP": [],
    "GIF": [b"!\xfe\3abc\0", b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0", b"\1\2\3"],
}


@pytest.mark.parametrize("kind", FORMATS)
def test_only_what_pixels_depend_on_reaches_the_decoder(kind: str) -> None:
    pictures = [scene(), scene().convert("L"), scene().convert("CMYK" if kind == "JPEG" else "P")]
    files = [encoded(one, kind, **({"transparency": 3} if kind == "GIF" else {})) for one in pictures]
    files += [encoded(scene(), kind, progressive=True)] if kind == "JPEG" else []
    for data in files:
        kept = [data[piece] for piece in read_header(data, MANY).pieces]
        assert b"".join(kept) == data
        if len(kept) > 1:
            start = len(kept[0]) + (25 if kind == "PNG" else 0)
            more = data[:start] + b"".join(USELESS[kind]) + data[start:]
            assert b"".join(more[piece] for piece in read_header(more, MANY).pieces) == data


def test_markers_are_found_across_the_borders_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encoded(scene(60, 50), "JPEG", progressive=True)
    whole = list(header._segments(file))
    assert [marker for marker, _ in whole].count(0xDA) > 3
    for size in range(1, 12):
        monkeypatch.setattr(header, "_SLICE", size)
        assert list(header._segments(file)) == whole
