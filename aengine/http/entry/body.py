"""Reads the body of a request within bounds, and decodes it into a struct.

Starlette's own bound on bodies is not used. It answers in plain text without the limit, and it takes precedence over
refusals that are sent before the body has arrived, such as 401.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from aengine.config import ServerConfig
from aengine.errors import InvalidRequestError
from aengine.http.entry.errors import HTTPError
from aengine.http.entry.malformed import find_unencodable
from aengine.sizes import format_bytes

PER_ITERATION = 8  # requests; parsing and enqueueing a request takes some tenths of a millisecond
# `curl -d` declares a form, but sends JSON here.
_JSON_TYPES = {"", "application/json", "application/x-www-form-urlencoded"}
# The cost of parsing each punctuation mark; other bytes cost little. Parsing blocks the loop, and in a thread it would
# hold the GIL.
_COSTS = {b",": 1, b'"': 1, b"{": 8, b"[": 8}
_ESCAPES = 8  # backslashes that cost as much as a comma
_MAX_COST = 2**19 + 2**16  # half a million token ids, about 15 ms of parsing
LARGE = 2**18  # bytes; parsing a shorter body takes no notable time
_SLICE = 2**20  # bytes whose cost is estimated in one iteration of the loop
_DIGITS = b"0123456789"
_MOST_DIGITS = 3  # consecutive slices of digits; parsing a number takes 2 ms for each slice
_LONGEST_NUMBER = 64  # bytes; a longer number is slow to read, and clients do not write whole numbers so

T = TypeVar("T")


class IterationLimiter:
    """Lets `per_iteration` tasks continue in each iteration of the event loop, in order of arrival.

    So a burst of requests never blocks the engine's running steps.
    """

    def __init__(self, per_iteration: int = PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        self._entered = 0  # in this iteration
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for the caller's turn. Return at once unless other tasks entered in the same iteration of the loop."""
        loop = asyncio.get_running_loop()
        if self._entered == self._per_iteration or self._waiting:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        if not self._entered:
            loop.call_soon(self._next_iteration)
        self._entered += 1

    def _next_iteration(self) -> None:
        self._entered = 0
        while self._waiting and self._entered < self._per_iteration:
            turn = self._waiting.popleft()
            if not turn.done():  # if it is done, its task was cancelled
                turn.set_result(None)
                self._entered += 1
        if self._entered:
            asyncio.get_running_loop().call_soon(self._next_iteration)


class BodyReader:
    """Reads bodies within the server's bounds. Large bodies are checked and parsed one after the other."""

    def __init__(self, config: ServerConfig) -> None:
        self._limit = config.max_body_bytes
        self._seconds = config.body_timeout
        self._large = IterationLimiter(1)

    async def read(self, request: Request) -> bytearray:
        """Return the whole body. A large body waits until the large bodies before it have been parsed.

        Raises: HTTPError with status 415, 413 or 408; ClientDisconnect if the client left. The rest is not read then.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in _JSON_TYPES:
            raise HTTPError(415, "unsupported_media_type", "the body must be JSON, with Content-Type: application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPError(415, "unsupported_media_type", "the body must not be compressed")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            raise _too_large(self._limit)
        try:
            with anyio.fail_after(self._seconds):
                body = await _receive_all(request.receive, self._limit)
        except TimeoutError:
            raise HTTPError(408, "body_timeout", f"the body did not arrive within {self._seconds:g} seconds") from None
        if len(body) > LARGE:
            if await self._parsing_cost(body) > _MAX_COST:
                raise HTTPError(
                    413,
                    "body_too_large",
                    f"the body holds too many values: at most {_MAX_COST}, "
                    f"where a text counts as 2, a list or object as 8, {_ESCAPES} escapes in texts as 1",
                )
            await self._large.enter()
        return body

    async def _parsing_cost(self, body: bytearray) -> int:
        """Estimate the parser's work from the punctuation in the body, including punctuation within texts."""
        cost = digits = 0
        for start in range(0, len(body), _SLICE):
            await self._large.enter()
            cost += sum(body.count(mark, start, start + _SLICE) * each for mark, each in _COSTS.items())
            cost += body.count(b"\\", start, start + _SLICE) // _ESCAPES
            digits = digits + 1 if _is_digits(body, start) else 0
            if digits == _MOST_DIGITS:
                raise HTTPError(
                    413, "body_too_large", f"the body holds more than {_MOST_DIGITS * _SLICE} digits in a row"
                )
        return cost


def _is_digits(body: bytearray, start: int) -> bool:
    """Whether a slice of the body has only digits. For most slices every 1024th byte decides."""
    end = start + _SLICE
    return not body[start:end:1024].strip(_DIGITS) and not body[start:end].strip(_DIGITS)


async def _receive_all(receive: Receive, limit: int) -> bytearray:
    body = bytearray()  # a list of chunks would cost 40 bytes more for each chunk
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise _too_large(limit)
    return body  # without a copy, which would take as long as parsing


def _too_large(limit: int) -> HTTPError:
    return HTTPError(413, "body_too_large", f"the body must not be longer than {format_bytes(limit)}")


FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # an object's fields as raw JSON
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")
_NAMED = re.compile(r"(?:missing required|unknown) field `(?P<name>[^`]*)`")


def decode(body: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the body into the decoder's struct. Raises `InvalidRequestError`, naming the invalid field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        whole = _whole_numbers(body, decoder) if "got `float`" in str(error) else body
        if whole != body:
            return decode(whole, decoder)
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, f"the body is not valid JSON: {error}" if body else "the body is empty") from None
    except UnicodeDecodeError:
        raise _malformed(body, "the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _whole_numbers(body: bytes | bytearray, decoder: msgspec.json.Decoder[Any]) -> bytes | bytearray:
    """Return the body with numbers such as 4.0 replaced by integers, in fields of the decoder's struct.

    JSON has one kind of number, and some clients write all numbers as floats.
    """
    try:
        fields = FIELDS.decode(body)
    except msgspec.ValidationError:  # not an object
        return body
    whole = {}
    for name in fields.keys() & {*getattr(decoder.type, "__struct_encode_fields__", ())}:
        text = bytes(memoryview(fields[name])[:_LONGEST_NUMBER])
        if len(text) == _LONGEST_NUMBER:
            continue
        if text[:1] in b"-0123456789" and not text.lstrip(b"-").isdigit() and float(text).is_integer():
            whole[name] = msgspec.Raw(str(int(float(text))).encode())
    return msgspec.json.encode(fields | whole) if whole else body


def _malformed(body: bytes | bytearray, text: str) -> InvalidRequestError:
    unencodable = find_unencodable(body)
    if unencodable is None:
        return InvalidRequestError(text)
    path, reason = unencodable
    return InvalidRequestError(f"{path}: {reason}" if path else reason, path or None)


def _invalid(text: str) -> InvalidRequestError:
    found = _PATH.search(text)
    path = found["path"] if found else ""
    text = text[: found.start()] if found else text
    if named := _NAMED.search(text):
        path = f"{path}.{named['name']}" if path else named["name"]
    path = path.replace("[...]", "")
    return InvalidRequestError(f"{path}: {text}" if path else text, path or None)
