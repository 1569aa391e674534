"""A request's body: bounded in size, JSON by content type, decoded into a struct."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from aengine.errors import InvalidRequestError
from aengine.http.errors import HTTPError
from aengine.http.malformed import find_unsayable

# `curl -d` declares a form; nobody means one here.
_JSON_TYPES = {"", "application/json", "application/x-www-form-urlencoded"}

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
            raise too_large
    return b"".join(chunks)


_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")
_NAMED = re.compile(r"(?:missing required|unknown) field `(?P<name>[^`]*)`")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's struct. Raises `InvalidRequestError` that names the offending field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, f"the body is not valid JSON: {error}" if body else "the body is empty") from None
    except UnicodeDecodeError:
        raise _malformed(body, "the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _malformed(body: bytes, text: str) -> InvalidRequestError:
    unsayable = find_unsayable(body)
    if unsayable is None:
        return InvalidRequestError(text)
    path, reason = unsayable
    return InvalidRequestError(f"{path}: {reason}" if path else reason, path or None)


def _invalid(text: str) -> InvalidRequestError:
    found = _PATH.search(text)
    path = found["path"] if found else ""
    text = text[: found.start()] if found else text
    if named := _NAMED.search(text):
        path = f"{path}.{named['name']}" if path else named["name"]
    path = path.replace("[...]", "")
    return InvalidRequestError(f"{path}: {text}" if path else text, path or None)
