"""Decodes images and resizes them, with Pillow. It takes up to seconds, mostly without Python's lock: use a thread."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from PIL.Image import Transpose
from PIL.ImageFile import ImageFile

from aengine.images.header import ORIENTATION, SIDEWAYS, Header, ImageFormat, bad_image

# Enough for photographs of 50 megapixels. One that large takes 0.3 to 0.8 GB while it is decoded.
MAX_PIXELS = 2**26
_STRIP = 2**20  # pixels

_FILES: dict[ImageFormat, type[ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.JpegImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
}
# What makes an image as it is seen of its stored pixels, by EXIF's orientation.
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


def decode_image(data: bytes, header: Header, width: int, height: int, resample: int) -> NDArray[np.uint8]:
    """Return the pixels of an image, resized: [height, width, 3].

    Rotation by EXIF is applied. Transparent parts are white. Of an animation, the first frame is read.

    Args:
        data: The bytes that `header` was read from.
        width, height: Of the result.
        resample: Pillow's number of the filter.

    Raises: InvalidRequestError, if the image is damaged
    """
    try:
        pieces = b"".join([data[piece] for piece in header.pieces])  # of bytes: other threads run meanwhile
        image = _FILES[header.format](BytesIO(pieces))  # no other decoder is tried, and nothing is decoded yet
        if image.size == header.stored:
            return _resized(image, header.orientation, width, height, resample)
    except MemoryError:
        raise bad_image("is too large for the memory of this machine; make it smaller") from None
    except Exception:  # noqa: BLE001 - decoders raise errors of many kinds, and their texts may tell of this machine
        pass
    raise bad_image(f"is a damaged or incomplete {header.format}; send the whole file, or save it again")


def size_of(image: Image.Image, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image of Pillow as it is seen.

    Raises `InvalidRequestError` if it has none, or more than `max_pixels`.
    """
    width, height = image.size
    if not width or not height:
        raise bad_image(f"is {width} x {height} pixels; send one with pixels")
    if width * height > max_pixels:
        raise bad_image(f"has {width} x {height} pixels, more than {max_pixels}; make it smaller")
    return (height, width) if _orientation(image) in SIDEWAYS else (width, height)


def resize_image(image: Image.Image, width: int, height: int, resample: int) -> NDArray[np.uint8]:
    """Like `decode_image`, for an image of Pillow."""
    try:
        return _resized(image, _orientation(image), width, height, resample)
    except MemoryError:
        raise bad_image("is too large for the memory of this machine; make it smaller") from None
    except Exception:  # noqa: BLE001 - as in `decode_image`
        raise bad_image("is damaged or incomplete; save it again") from None


def as_png(image: Image.Image) -> bytes:
    """Return an image of Pillow as a PNG of the pixels that `resize_image` reads. Raises like `resize_image`."""
    file = BytesIO()
    try:
        _seen(image, _orientation(image)).save(file, "PNG", compress_level=1)
    except MemoryError:
        raise bad_image("is too large for the memory of this machine; make it smaller") from None
    except Exception:  # noqa: BLE001 - as in `decode_image`
        raise bad_image("is damaged or incomplete; save it again") from None
    return file.getvalue()


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - damaged EXIF data says nothing
        return 1


def _resized(image: Image.Image, orientation: int, width: int, height: int, resample: int) -> NDArray[np.uint8]:
    seen = _seen(image, orientation)
    return np.array(seen if seen.size == (width, height) else seen.resize((width, height), resample))


def _seen(image: Image.Image, orientation: int) -> Image.Image:
    image.load()
    seen = _in_colours(image)
    return seen.transpose(_TURNS[orientation]) if orientation in _TURNS else seen


def _in_colours(image: Image.Image) -> Image.Image:
    """Return an image in 8-bit colours, over white. It is computed in strips, which need little further memory."""
    if image.mode == "RGB" and not _is_transparent(image):
        return image
    colours = Image.new("RGB", image.size)
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        colours.paste(_strip_in_colours(image.crop(box)), box)
    return colours


def _is_transparent(image: Image.Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _strip_in_colours(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey
        grey = np.asarray(image).astype(np.uint16) >> 8
        return Image.fromarray(grey.astype(np.uint8))
    if _is_transparent(image):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
