"""Images in the messages of a `Client`: they are read here, and sent in base64."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyio import to_thread

from aengine.engine.requests.image_parts import ImagePart, about_part, take_images
from aengine.errors import InvalidRequestError

_TAKEN = {"type": "image"}  # what `take_images` leaves
_SENT = ".image_url.url"  # the field of a part in which an image is sent


async def encode_images(chat: list[dict[str, Any]]) -> None:
    """Replace the images of a chat by data URLs. Raises the errors of `Engine.chat` for images that cannot be read.

    Contents of messages are replaced, not changed. Images are read and encoded in a thread.
    """
    if not (parts := take_images(chat)):
        return
    urls = iter([await to_thread.run_sync(_data_url, part) for part in parts])
    for message in chat:
        if isinstance(content := message.get("content"), list):
            message["content"] = [
                {"type": "image_url", "image_url": {"url": next(urls)}} if part == _TAKEN else part for part in content
            ]


@contextmanager
def parts_as_given() -> Iterator[None]:
    """Name the part of a message in errors about an image, as `Engine.chat` does, and not the field that was sent."""
    try:
        yield
    except InvalidRequestError as error:
        if (param := error.param or "").endswith(_SENT):
            raise InvalidRequestError(str(error).replace(_SENT, "", 1), param.partition("[")[0]) from None
        raise


def _data_url(part: ImagePart) -> str:
    from PIL import Image  # only programs that send images load Pillow

    from aengine.images.files import file_bytes
    from aengine.images.pixels import MAX_PIXELS, as_png, size_of

    source = part.source
    try:
        if isinstance(source, Image.Image):
            size_of(source, MAX_PIXELS)
            data = as_png(source)
        else:
            data = file_bytes(source)
    except InvalidRequestError as error:
        raise about_part(part.name, error) from None
    return "data:;base64," + base64.b64encode(data).decode()
