"""A request's body: bounded in size, JSON by content type, decoded into a struct."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from aengine.errors import InvalidRequestError
from aengine.http.errors import HTTPError

# `curl -d` declares a form; nobody means one here.
_JSON_TYPES = {"", "application/json", "application/x-www-form-urlencoded"}
# What is spent on reading a refused body: a client that is still sending would see a reset instead of the answer.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 2**20

# What parsing costs beside the bytes, which are cheap: it holds the loop, and a thread would hold the GIL as well.
_WEIGHTS = {b",": 1, b'"': 1, b"{": 8, b"[": 8}
_MAX_WEIGHT = 2**20 + 2**16  # a million token ids, about 25 ms
LARGE = 2**18  # bytes; below, nobody notices
_SLICE = 2**20  # bytes weighed between two turns of the loop

T = TypeVar("T")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises `HTTPError` 415 or 413, `ClientDisconnect` when the client left."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _JSON_TYPES:
        raise HTTPError(415, "unsupported_media_type", "the body must be JSON, with Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPError(415, "unsupported_media_type", "the body must not be compressed")
    length = request.headers.get("content-length", "")
    too_large = HTTPError(413, "body_too_large", f"the body must not be longer than {limit} bytes")
    if length.isdigit() and int(length) > limit:
        await _discard(request.receive)
        raise too_large
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
        size += len(chunks[-1])
        if size > limit:
            if more:
                await _discard(request.receive)
            raise too_large
    body = b"".join(chunks)
    if len(body) > LARGE and await _weight(body) > _MAX_WEIGHT:
        raise HTTPError(
            413,
            "body_too_large",
            f"the body holds too many values: at most {_MAX_WEIGHT}, where a text counts as 2, a list or object as 8",
        )
    return body


async def _weight(body: bytes) -> int:
    """How much there is to parse. Punctuation within texts counts too: a text that has a million is none to answer."""
    weight = 0
    for start in range(0, len(body), _SLICE):
        weight += sum(body.count(mark, start, start + _SLICE) * each for mark, each in _WEIGHTS.items())
        await asyncio.sleep(0)
    return weight


async def _discard(receive: Receive) -> None:
    size = 0
    with anyio.move_on_after(_LINGER_SECONDS):
        while size <= _LINGER_BYTES:
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):  # the end, or a disconnect
                return


_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")
_NAMED = re.compile(r"(?:missing required|unknown) field `(?P<name>[^`]*)`")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's struct. Raises `InvalidRequestError` that names the offending field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}" if body else "the body is empty") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _invalid(text: str) -> InvalidRequestError:
    found = _PATH.search(text)
    path = found["path"] if found else ""
    text = text[: found.start()] if found else text
    if named := _NAMED.search(text):
        path = f"{path}.{named['name']}" if path else named["name"]
    path = path.replace("[...]", "")
    return InvalidRequestError(f"{path}: {text}" if path else text, path or None)
