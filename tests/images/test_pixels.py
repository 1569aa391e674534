"""Pixels are those that Pillow and transformers make of an image; damaged files are refused in our own words."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from aengine.errors import InvalidRequestError
from aengine.images import pixels
from aengine.images.header import read_header
from aengine.images.pixels import MAX_PIXELS, decode_image, resize_image, size_of
from tests.images.files import FORMATS, encoded, png_chunk, png_that_claims, scene, with_orientation

BICUBIC = 3


def decode(data: bytes, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Decode an image and resize it. size: width and height. None: its own."""
    header = read_header(data, MAX_PIXELS)
    return decode_image(data, header, *(size or header.size), BICUBIC)


def as_transformers(data: bytes) -> NDArray[np.uint8]:
    turned = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    return np.asarray(convert_to_rgb(turned, return_numpy=True))


@pytest.mark.parametrize("kind", ["PNG", "WebP"])
def test_formats_without_loss(kind: str) -> None:
    assert np.array_equal(decode(encoded(scene(), kind)), np.asarray(scene()))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "RGB"])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_mode_becomes_colours_over_white_as_in_transformers(kind: str, mode: str) -> None:
    image = scene().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image = image.convert(mode)
    try:
        data = encoded(image, kind)
    except (OSError, KeyError, ValueError):
        pytest.skip("the format has no such mode")
    assert np.array_equal(decode(data), as_transformers(data))


@pytest.mark.parametrize("strip", [1, 37, 100])
@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1"])
def test_colours_are_the_same_in_strips_of_any_size(mode: str, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    image = scene().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = encoded(image.convert(mode), "PNG")
    monkeypatch.setattr(pixels, "_STRIP", strip)
    assert np.array_equal(decode(data), as_transformers(data))


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images_of_pillow_are_like_their_files(kind: str, orientation: int) -> None:
    data = with_orientation(scene(), kind, orientation)
    header, image = read_header(data, MAX_PIXELS), Image.open(BytesIO(data))
    assert size_of(image, MAX_PIXELS) == header.size
    assert np.array_equal(resize_image(image, 20, 12, BICUBIC), decode(data, (20, 12)))


def test_images_of_pillow_that_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="image: has 37 x 23 pixels, more than 800; make it smaller"):
        size_of(scene(), 800)
    with pytest.raises(InvalidRequestError, match="image: is 0 x 5 pixels"):
        size_of(Image.new("RGB", (0, 5)), 800)
    damaged = Image.open(BytesIO(encoded(scene(), "PNG")[:100]))
    with pytest.raises(InvalidRequestError, match="image: is damaged or incomplete; save it again"):
        resize_image(damaged, 20, 12, BICUBIC)


def test_a_palette_with_a_transparent_colour() -> None:
    image = scene().convert("P")
    data = encoded(image, "PNG", transparency=image.getpixel((0, 0)))
    found = decode(data)
    assert found[0, 0].tolist() == [255, 255, 255]
    assert np.array_equal(found, as_transformers(data))


def test_sixteen_bits_of_grey_keep_their_brightness() -> None:
    numbers = np.linspace(0, 65535, 100).astype(np.uint16).reshape(4, 25)
    found = decode(encoded(Image.fromarray(numbers), "PNG"))
    assert np.array_equal(found, np.repeat((numbers >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_of_an_animation_the_first_frame_is_read() -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "WebP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
        assert np.array_equal(decode(data), np.full((10, 20, 3), (255, 0, 0)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP"])
def test_images_are_turned_as_they_are_seen(kind: str, orientation: int) -> None:
    data = with_orientation(scene(), kind, orientation)
    assert np.array_equal(decode(data), as_transformers(data))


@pytest.mark.parametrize("size", [(16, 8), (80, 50), (37, 50), (1, 1)])
def test_resizing_is_pillows(size: tuple[int, int]) -> None:
    assert np.array_equal(decode(encoded(scene(), "PNG"), size), np.asarray(scene().resize(size, BICUBIC)))


def test_an_image_of_its_own_size_is_not_resized_and_can_be_written_to() -> None:
    found = decode(encoded(scene(), "PNG"))
    found[0, 0] = 1
    assert np.array_equal(found[1:], np.asarray(scene())[1:])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_within_its_pixels_is_refused(kind: str) -> None:
    rng = np.random.default_rng(1)
    data = encoded(Image.fromarray(rng.integers(0, 256, (60, 80, 3)).astype(np.uint8)), kind)
    with pytest.raises(InvalidRequestError, match=f"image: is a damaged or incomplete {kind}; send the whole file"):
        decode(data[: len(data) // 2])


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_give_pixels_or_our_own_words(kind: str) -> None:
    data = encoded(scene(), kind)
    rng = np.random.default_rng(3)
    for _ in range(150):
        damaged = bytearray(data)
        for at in rng.integers(2, len(data), 3):
            damaged[at] = rng.integers(0, 256)
        try:
            decode(bytes(damaged))
        except InvalidRequestError as error:
            assert error.__cause__ is None  # noqa: PT017
            assert "0x" not in str(error)  # noqa: PT017
            assert "/" not in str(error)  # noqa: PT017


def test_a_png_with_too_few_pixels_for_its_size_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="damaged or incomplete PNG"):
        decode(png_that_claims(5000, 5000), (10, 10))


def test_a_gif_whose_frame_is_larger_than_its_screen_is_refused() -> None:
    data = bytearray(encoded(scene(), "GIF"))
    data[6:10] = (10).to_bytes(2, "little") * 2  # of the screen; the frame stays 37 x 23
    with pytest.raises(InvalidRequestError, match="damaged or incomplete GIF"):
        decode(bytes(data))


def test_a_file_of_two_formats_is_read_as_the_one_that_it_begins_with() -> None:
    png, gif = encoded(scene(), "PNG"), encoded(Image.new("RGB", (5, 5)), "GIF")
    assert np.array_equal(decode(png + gif), np.asarray(scene()))
    inside = png[:33] + png_chunk(b"zzZz", gif) + png[33:]
    assert np.array_equal(decode(inside), np.asarray(scene()))


def test_a_jpeg_is_not_read_as_a_png_that_follows_it() -> None:
    data = encoded(scene(), "JPEG") + encoded(Image.new("RGB", (5, 5)), "PNG")
    assert decode(data).shape == (23, 37, 3)
