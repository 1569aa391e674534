"""The images of a request as they are sent: in base64, up to tens of megabytes, or as URLs.

Base64 is decoded in slices, one in each iteration of the loop, and a thread joins them. Files of URLs are fetched.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
from anyio import to_thread

from aengine.config import ServerConfig
from aengine.errors import InvalidRequestError
from aengine.http.entry.body import IterationLimiter
from aengine.http.fetching.exchange import TOO_LARGE, FetchError
from aengine.http.fetching.fetcher import ImageFetcher

_SLICE = 2**18  # characters of base64; decoding them takes 0.6 ms
_MOST_URLS = 100  # different ones of a request
_AT_ONCE = 4  # files of a request, so that others are fetched beside it


class EncodedImage(NamedTuple):
    """An image in base64 that is not decoded yet."""

    path: str  # of its field, for errors
    text: str
    start: int = 0  # where the base64 begins in the text


class LinkedImage(NamedTuple):
    """An image by its http or https URL, that is not fetched yet."""

    path: str  # of its field, for errors
    url: str


ImageSource = EncodedImage | LinkedImage


class ImageLoader:
    """Loads the images of all requests."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises `ConfigError` for a malformed host in `image_url_hosts`."""
        self.fetcher = ImageFetcher(config.image_url_hosts)
        self.turns = IterationLimiter(1)  # one slice of base64 in each iteration of the loop
        self.seconds = config.image_url_timeout
        self.most_bytes = config.max_body_bytes


@dataclass(slots=True)
class RequestImages:
    """Loads the images of one request. Each URL is fetched once."""

    _loader: ImageLoader
    _fetched: dict[str, bytes] = field(default_factory=dict)  # by URL
    _taken: int = 0  # bytes of all of them

    async def load(self, sources: Sequence[ImageSource]) -> list[bytes]:
        """Return the files of images. Raises `InvalidRequestError`, naming the field of an image."""
        await self._fetch_all([one for one in sources if isinstance(one, LinkedImage)])
        return [
            self._fetched[one.url] if isinstance(one, LinkedImage) else await _decoded(one, self._loader.turns)
            for one in sources
        ]

    async def _fetch_all(self, images: Sequence[LinkedImage]) -> None:
        """Fetch what has not been fetched. Nothing is fetched if a URL is refused."""
        new = {one.url: one for one in reversed(images) if one.url not in self._fetched}  # the first of each URL
        if len(new) > _MOST_URLS:
            path = images[_MOST_URLS].path
            raise InvalidRequestError(
                f"{path}: at most {_MOST_URLS} URLs of a request are fetched; send other images in base64", path
            )
        for one in reversed(new.values()):
            try:
                self._loader.fetcher.check(one.url)
            except FetchError as error:
                raise _refused(one, error) from None
        failures: list[InvalidRequestError] = []
        at_once = anyio.CapacityLimiter(_AT_ONCE)
        with anyio.move_on_after(self._loader.seconds) as limit:
            async with anyio.create_task_group() as tasks:

                async def fetch(image: LinkedImage) -> None:
                    try:
                        async with at_once:
                            await self._fetch(image)
                    except InvalidRequestError as error:
                        failures.append(error)
                        tasks.cancel_scope.cancel()

                for one in reversed(new.values()):
                    tasks.start_soon(fetch, one)
        if failures:
            raise failures[0]
        if limit.cancelled_caught:
            late = next(one for one in reversed(new.values()) if one.url not in self._fetched)
            raise InvalidRequestError(
                f"{late.path}: did not arrive within {self._loader.seconds:g} seconds (the server's knob "
                "image_url_timeout); try again, or send the image in base64",
                late.path,
            )

    async def _fetch(self, image: LinkedImage) -> None:
        fetcher, most = self._loader.fetcher, self._loader.most_bytes
        try:
            data = await fetcher.fetch(fetcher.check(image.url), most - self._taken)
            self._taken += len(data)
            if self._taken > most:  # others arrived meanwhile
                raise FetchError(TOO_LARGE)
        except FetchError as error:
            raise _refused(image, error) from None
        self._fetched[image.url] = bytes(data)


def _refused(image: LinkedImage, error: FetchError) -> InvalidRequestError:
    return InvalidRequestError(f"{image.path}: {error}", image.path)


async def _decoded(image: EncodedImage, turns: IterationLimiter) -> bytes:
    """Return the bytes of an image. Raises `InvalidRequestError` for anything but strict base64."""
    path, text, start = image
    pieces = []
    for begin in range(start, len(text), _SLICE):
        await turns.enter()
        base64 = text[begin : begin + _SLICE]
        try:
            piece = binascii.a2b_base64(base64, strict_mode=True)
        except ValueError:  # also for characters that are not ASCII
            piece = b""
        if not piece or (begin + _SLICE < len(text) and len(piece) * 4 != len(base64) * 3):
            raise InvalidRequestError(f"{path}: is not base64 of the standard alphabet, with padding", path)
        pieces.append(piece)
    if not pieces:
        raise InvalidRequestError(f"{path}: is empty; send the bytes of a file", path)
    return pieces[0] if len(pieces) == 1 else await to_thread.run_sync(_join, pieces)


def _join(pieces: Sequence[bytes]) -> bytes:
    """Join pieces. It takes milliseconds, and lets other threads run meanwhile."""
    return b"".join(pieces)
