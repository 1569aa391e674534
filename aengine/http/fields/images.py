"""Parts of messages that are not text: images that the model reads, and texts in place of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple, Unpack

import msgspec

from aengine.errors import ContextLengthError, InvalidRequestError
from aengine.http.engine_like import EngineLike
from aengine.http.fields.image_sources import EncodedImage, ImageSource, LinkedImage, RequestImages
from aengine.text.answer.parser import ChatPrompt
from aengine.text.template.messages import TemplateOptions

_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
}
_LONGEST_HEAD = 256  # characters of a data URL before its data
_DATA_URL = "a data URL in base64, such as data:image/png;base64,iVBO..."


class ImageUrl(msgspec.Struct, kw_only=True):
    """A data URL in base64, or an http or https URL that the server fetches if its knob `image_url_hosts` allows."""

    url: str
    detail: str | None = None  # accepted without effect: the model decides


Piece = str | ImageSource


class MediaRules(NamedTuple):
    """Which parts of messages a model reads, besides text."""

    no_images: str  # why it reads no images; empty if it does
    in_results: bool  # whether results of tools may have images

    def instead_of(self, kind: str, role: str, path: str, *, newest: bool) -> str | None:
        """Return the text in place of a part; None if the part is an image that the model reads, or no media at all.

        Raises `InvalidRequestError` instead if the part is in the user's newest message.

        kind: the part's type. role: of its message. newest: whether it is the user's newest message.
        """
        if (media := _MEDIA.get(kind)) is None:
            return None
        is_image = media == "image"
        if is_image and not self.no_images and (role == "user" or (role == "tool" and self.in_results)):
            return None
        if newest and is_image and self.no_images:
            raise InvalidRequestError(
                f"{path}.type: the model takes no images: {self.no_images}; send text alone", f"{path}.type"
            )
        reads = "text only" if self.no_images else "text and images"
        if newest:
            raise InvalidRequestError(f"{path}.type: this model reads {reads}, not {kind!r}", f"{path}.type")
        if is_image and not self.no_images:
            reads = "images in messages of the user" + (" and results of tools" if self.in_results else "") + " only"
        return f"[{media} left out: this model reads {reads}]"


def image_of_url(url: str | None, path: str) -> ImageSource:
    """Return the image of a URL. path: of its field. Raises `InvalidRequestError`."""
    if url is None:
        raise InvalidRequestError(f"{path}: an image must have it: {_DATA_URL}", path)
    head, comma, _ = url[:_LONGEST_HEAD].partition(",")
    form = head.strip().lower()
    if form.startswith(("http:", "https:")):
        return LinkedImage(path, url)
    if not comma or not form.startswith("data:") or not form.endswith(";base64"):
        raise InvalidRequestError(f"{path}: must be {_DATA_URL}", path)
    return EncodedImage(path, url, len(head) + 1)


def content_of(pieces: Iterable[Piece], between: str = "") -> str | list[dict[str, Any]]:
    """Return pieces as the content of a message: text alone as a string, text with images as a list of parts.

    between: joins texts that follow each other.
    """
    parts: list[dict[str, Any]] = []
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_text:
            parts.append({"type": "text", "text": between.join(str(piece) for piece in run)})
        else:
            parts += ({"type": "image", "image": piece} for piece in run)
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts or ""


async def encode_chat(
    engine: EngineLike,
    images: RequestImages,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None,
    context: int | None = None,
    **options: Unpack[TemplateOptions],
) -> ChatPrompt:
    """Load the images of messages, and call `engine.encode_chat`. images: loads those of the request.

    Raises its errors; those about an image have its field as `param`.
    """
    paths: dict[str, str] = {}
    parts: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if isinstance(content := message.get("content"), list):
            for j, part in enumerate(content):
                if isinstance(image := part.get("image"), (EncodedImage, LinkedImage)):
                    paths[f"messages[{i}].content[{j}]"] = image.path
                    parts.append(part)
    if parts:
        for part, data in zip(parts, await images.load([part["image"] for part in parts])):
            part["image"] = data
    try:
        return await engine.encode_chat(messages, tools=tools, context=context, **options)
    except InvalidRequestError as error:
        raise _about_field(error, paths) from None


def _about_field(error: InvalidRequestError, paths: Mapping[str, str]) -> InvalidRequestError:
    """Return an error about an image under the name of its field in the request. Other errors stay as they are."""
    part, _, text = str(error).partition(": ")
    if part not in paths or isinstance(error, ContextLengthError):
        return error
    return InvalidRequestError(f"{paths[part]}: {text}", paths[part])
