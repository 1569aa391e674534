"""Reads one file over a connection, in HTTP/1.1, within bounds."""

from __future__ import annotations

import asyncio

import anyio
import h11
from anyio.abc import ByteStream

from aengine.http.fetching.urls import ImageLink

_READ = 2**14  # bytes
_LONGEST_HEAD = 2**14  # bytes; parsing them as headers of a few bytes takes up to 25 ms
_TURN = 64  # reads and pieces between which other tasks run
# The most reads and pieces, so that a host cannot occupy the server by a file in pieces of one byte.
_MOST_PIECES = 4096
_LEAST_MEAN = 128  # bytes of further pieces
TOO_LARGE = "is too large: all images of a request that are fetched share the server's max_body_bytes; make it smaller"


class FetchError(Exception):
    """An image could not be fetched. The text completes `{field}: `, and names neither the host nor an address."""


async def read_file(stream: ByteStream, link: ImageLink, most: int) -> bytearray:
    """Request the file of a link, and return its bytes. most: how many it may have.

    No redirect is followed. Raises `FetchError`.
    """
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
    headers = [
        ("Host", link.authority),
        ("User-Agent", "aengine"),
        ("Accept", "image/png, image/jpeg, image/webp, image/gif"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    request = h11.Request(method="GET", target=link.target, headers=headers)
    try:
        await stream.send((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
        return await _read_answer(stream, http, most)
    except h11.RemoteProtocolError:
        raise FetchError("its host answered with invalid or incomplete HTTP; send the image in base64") from None
    except (OSError, anyio.BrokenResourceError):  # SSLError is an OSError
        raise FetchError("its host closed the connection; try again, or send the image in base64") from None


async def _read_answer(stream: ByteStream, http: h11.Connection, most: int) -> bytearray:
    body = bytearray()
    pieces = 0
    while True:
        pieces += 1
        if pieces > _MOST_PIECES + len(body) // _LEAST_MEAN:
            raise FetchError("its host sends it in too many small pieces; send the image in base64")
        if pieces % _TURN == 0:
            await asyncio.sleep(0)
        event = http.next_event()
        if event is h11.NEED_DATA:
            try:
                http.receive_data(await stream.receive(_READ))
            except anyio.EndOfStream:
                http.receive_data(b"")
        elif isinstance(event, h11.Response):
            _check_head(event, most)
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > most:
                raise FetchError(TOO_LARGE)
        elif isinstance(event, h11.EndOfMessage):
            return body
        elif not isinstance(event, h11.InformationalResponse):  # another protocol
            raise h11.RemoteProtocolError("no answer")


def _check_head(answer: h11.Response, most: int) -> None:
    status = answer.status_code
    if 300 <= status < 400:
        raise FetchError("its host redirects elsewhere, which is not followed; send the URL of the file itself")
    if status != 200:
        raise FetchError(f"its host answered with status {status}; check the URL, or send the image in base64")
    for name, value in answer.headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise FetchError("its host sends it compressed, which is not read; send the image in base64")
        if name == b"content-length" and int(value) > most:  # only digits, or h11 would have refused it
            raise FetchError(TOO_LARGE)
