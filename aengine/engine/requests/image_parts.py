"""Takes the images out of the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aengine.errors import InvalidRequestError

_OTHER_FORMS = ("image_url", "input_image")
_UNREAD = ("video", "video_url", "audio", "audio_url", "input_audio", "file", "input_file", "document")


class ImagePart(NamedTuple):
    """An image in the content of a message."""

    name: str  # of the part, for errors
    source: object  # bytes, a path or an image of Pillow; not checked yet


def take_images(messages: list[dict[str, Any]]) -> list[ImagePart]:
    """Return the images of a chat in order. Replace each by `{"type": "image"}`, which chat templates expect.

    Parts of text alone become one text, as over HTTP: most templates take no parts, or write them as Python shows them.

    The messages are changed, the contents that they refer to are not. Raises `InvalidRequestError` for other
    forms, and for parts that are neither text nor images.
    """
    parts: list[ImagePart] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            taken = [_take(part, f"messages[{i}].content[{j}]", parts) for j, part in enumerate(content)]
            texts = [_text(part) for part in taken]
            message["content"] = taken if None in texts else "".join(filter(None, texts))
    return parts


def _text(part: object) -> str | None:
    """Return the text of a part; None if it has another form."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _take(part: object, name: str, parts: list[ImagePart]) -> object:
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    if kind in _UNREAD:
        raise InvalidRequestError(f"{name}: models read text and images, not {kind!r}; leave it out", "messages")
    if kind != "image" and kind not in _OTHER_FORMS:
        return part
    if kind != "image" or "image" not in part:
        raise InvalidRequestError(
            f'{name}: an image must be given as {{"type": "image", "image": ...}}, with the bytes of a file, a path or '
            "an image of Pillow",
            "messages",
        )
    parts.append(ImagePart(name, part["image"]))
    return {"type": "image"}


def about_part(name: str, error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about an image with the name of its part in the text."""
    return InvalidRequestError(f"{name}: {str(error).removeprefix('image: ')}", "messages")


def no_images_error(part: ImagePart, why: str) -> InvalidRequestError:
    """Return the error about an image for a model that takes none. why: the reason."""
    return InvalidRequestError(f"{part.name}: the model takes no images: {why}; send text alone", "messages")
