"""Reads the images of a chat, and places their tokens in its prompt.

Files are read, decoded and resized in threads. The number of images, their pixels and their tokens are bounded before
anything is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TypeVar

import anyio
from anyio import to_thread
from msgspec.structs import replace
from PIL import Image

from aengine.cache.image_keys import ImageKeys
from aengine.cache.recently_used import RecentlyUsed
from aengine.engine.interpreter import QuickSwitches
from aengine.engine.requests.image_parts import ImagePart, about_part
from aengine.errors import CheckpointError, ContextLengthError, InvalidRequestError
from aengine.images.files import file_bytes
from aengine.images.header import Header, read_header
from aengine.images.pixels import MAX_PIXELS, decode_image, resize_image, size_of
from aengine.model.images.positions import grid_positions
from aengine.model.images.resizing import ImagePlan
from aengine.model.images.spec import ImageSpec
from aengine.prompt_images import PlacedImage, PromptImages
from aengine.text.tokens.tokenizer import Tokenizer

MAX_IMAGES = 256  # of a chat
MAX_CHAT_PIXELS = 2**28  # of all images of a chat, before they are resized; decoding them takes about 4 s
KEPT_BYTES = 2**28  # of pixels, so that the next turn of a chat does not decode its images again
_THREADS = 2  # each image may take 0.8 GB while it is decoded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SizedImage:
    """An image that is not decoded yet."""

    name: str  # of its part, for errors
    pixels: int  # before it is resized
    plan: ImagePlan
    resize: Callable[[], bytes]  # decodes and resizes it as planned; takes up to seconds
    digest: bytes | None = None  # sha256 of its file


class ImageReading:
    """Reads images for one model."""

    def __init__(self, spec: ImageSpec, tokenizer: Tokenizer) -> None:
        """Raises `CheckpointError` if the tokenizer lacks a token that separates rows of an image."""
        marks = spec.placeholders
        self._spec = spec
        self._row_end, self._last = (_token_id(tokenizer, text) for text in (marks.row_end, marks.last))
        self._before, self._after = (_ids(tokenizer, parts) for parts in (marks.before, marks.after))
        # Whether results of tools may have images.
        self.in_results = tokenizer.writes_images_of_results(tokenizer.decode([marks.marker], False))
        self._keys = ImageKeys()
        self._placed: RecentlyUsed[bytes, PlacedImage] = RecentlyUsed(KEPT_BYTES)  # by the digest of the file
        self._threads = anyio.CapacityLimiter(_THREADS)
        # Reading the parts of a file holds the GIL, for up to tenths of a second.
        self._quick_switches = QuickSwitches()

    async def read_sizes(self, parts: Sequence[ImagePart], context: int | None) -> list[SizedImage]:
        """Return the sizes of images. Raises `InvalidRequestError`, naming the part.

        context: the most tokens of the model. `ContextLengthError` is raised if the images alone have as many.
        """
        if len(parts) > MAX_IMAGES:
            raise InvalidRequestError(
                f"messages: have {len(parts)} images, at most {MAX_IMAGES} are read; send fewer", "messages"
            )
        sized = []
        pixels = tokens = 0
        for part in parts:
            one = await self._in_thread(part.name, partial(self._size, part))
            sized.append(one)
            pixels, tokens = pixels + one.pixels, tokens + one.plan.tokens
            if pixels > MAX_CHAT_PIXELS:
                raise InvalidRequestError(
                    f"{part.name}: the images up to this one have {pixels} pixels, more than {MAX_CHAT_PIXELS}; make "
                    "them smaller, or send fewer",
                    "messages",
                )
            _check_fits(tokens, context)
        return sized

    async def place(
        self, token_ids: Sequence[int], sized: Sequence[SizedImage], context: int | None
    ) -> tuple[list[int], PromptImages]:
        """Replace the markers in a rendered chat by the tokens of its images, which are decoded.

        Raises `InvalidRequestError` if an image is damaged, or if the chat template has left one out.
        """
        marks = self._spec.placeholders
        markers = [index for index, token_id in enumerate(token_ids) if token_id == marks.marker]
        if len(markers) != len(sized):
            raise InvalidRequestError(
                f"messages: have {len(sized)} images, but the chat template wrote {len(markers)}; send images in the "
                "messages of the user only",
                "messages",
            )
        ids: list[int] = []
        starts: list[int] = []
        end = 0
        for marker, image in zip(markers, sized):
            ids += [*token_ids[end:marker], *self._before]
            starts.append(len(ids))
            ids += [*marks.ids(image.plan, self._row_end, self._last), *self._after]
            end = marker + 1
        ids += token_ids[end:]
        _check_fits(len(ids), context)
        images = [await self._decode(one) for one in sized]
        placed = tuple(replace(image, start=start) for image, start in zip(images, starts))
        return ids, PromptImages(placed, self._shift(placed), self._spec.splittable)

    def with_keys(self, images: PromptImages) -> PromptImages:
        """Return the images with their keys in the prefix cache. Call it when the request is enqueued."""
        return replace(
            images, images=tuple(replace(image, key=self._keys.key(image.digest)) for image in images.images)
        )

    def forget_keys(self) -> None:
        """Use other keys from now on, because the weights have changed."""
        self._keys.forget()

    def _size(self, part: ImagePart) -> SizedImage:
        source, spec = part.source, self._spec
        if isinstance(source, Image.Image):
            width, height = size_of(source, MAX_PIXELS)
            plan = spec.plan(width, height)
            return SizedImage(
                part.name,
                width * height,
                plan,
                lambda: resize_image(source, plan.width, plan.height, spec.resample).tobytes(),
            )
        data = file_bytes(source)
        header: Header = read_header(data, MAX_PIXELS)
        width, height = header.size
        plan = spec.plan(width, height)
        return SizedImage(
            part.name,
            width * height,
            plan,
            lambda: decode_image(data, header, plan.width, plan.height, spec.resample).tobytes(),
            sha256(data).digest(),
        )

    async def _decode(self, image: SizedImage) -> PlacedImage:
        if image.digest is None:
            return await self._in_thread(image.name, partial(self._decode_now, image))
        if (known := self._placed.get(image.digest)) is not None:
            return known
        made = await self._in_thread(image.name, partial(self._decode_now, image))
        if self._placed.get(image.digest) is None:  # another request may have decoded it meanwhile
            self._placed.put(image.digest, made, len(made.pixels))
        return made

    def _decode_now(self, image: SizedImage) -> PlacedImage:
        plan, pixels = image.plan, image.resize()
        return PlacedImage(
            digest=sha256(f"{plan.width} {plan.height} ".encode() + pixels).digest(),
            width=plan.width,
            height=plan.height,
            pixels=pixels,
            start=0,
            rows=plan.rows,
            columns=plan.columns,
            gap=0 if self._row_end is None else 1,
        )

    def _shift(self, images: Sequence[PlacedImage]) -> int:
        """Return how far the positions after the last image are shifted."""
        if self._spec.grid_rope is None:
            return 0
        return grid_positions([ImagePlan(one.width, one.height, one.rows, one.columns) for one in images])[1]

    async def _in_thread(self, name: str, work: Callable[[], T]) -> T:
        try:
            with self._quick_switches:
                return await to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)
        except InvalidRequestError as error:
            raise about_part(name, error) from None


def _check_fits(tokens: int, context: int | None) -> None:
    if context is not None and tokens >= context:
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens. However, at least {tokens} tokens are given as "
            "prompt with its images, and at least one must be left",
            "messages",
        )


def _token_id(tokenizer: Tokenizer, text: str) -> int | None:
    if not text:
        return None
    if (found := tokenizer.token_id(text)) is None:
        raise CheckpointError(f"the tokenizer has no token {text}, which images need")
    return found


def _ids(tokenizer: Tokenizer, parts: Sequence[str | int]) -> list[int]:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else tokenizer.encode_now(part, add_special_tokens=False)
    return ids
