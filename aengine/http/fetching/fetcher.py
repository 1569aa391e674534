"""Fetches images from allowed hosts: it resolves a name once, checks every address, and connects to what it checked."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

import anyio
from anyio import to_thread
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from aengine.http.fetching.exchange import FetchError, read_file
from aengine.http.fetching.urls import Address, AllowedHosts, ImageLink, read_address, read_link

_PLACES = 32  # files that are fetched at once
_LOOKUPS = 8  # threads; a lookup cannot be cancelled, and keeps its thread until it ends
_CONNECT_SECONDS = 3.0  # for each address, with TLS
_MOST_ADDRESSES = 4  # of a name, that are tried one after the other

Resolve = Callable[[str, int], Sequence[str]]


def _lookup(host: str, port: int) -> list[str]:
    """Return the addresses of a name. Raises OSError. Does blocking I/O; call it in a worker thread."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class ImageFetcher:
    """Fetches files from the hosts of a list.

    It opens a connection for each file and closes it afterwards. It sends no cookies or credentials, and uses no proxy.
    """

    def __init__(
        self, hosts: Sequence[str], *, resolve: Resolve = _lookup, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        """Raises `ConfigError` if `hosts` has an entry of another form than `AllowedHosts` reads.

        resolve: returns the addresses of a name. tls: makes the settings of HTTPS when they are first needed.
        """
        self._hosts = AllowedHosts(hosts)
        self._resolve = resolve
        self._make_tls = _default_tls if tls is None else tls
        self._tls: ssl.SSLContext | None = None
        self._places = anyio.Semaphore(_PLACES)
        self._lookups = anyio.CapacityLimiter(_LOOKUPS)

    def check(self, url: str) -> ImageLink:
        """Return the parsed URL of an allowed host. Raises `FetchError`."""
        if not self._hosts:
            raise FetchError(
                "this server fetches no URLs, because its knob image_url_hosts names no hosts; send the image in base64"
            )
        if (link := read_link(url)) is None:
            raise FetchError(
                "must be http:// or https:// with a host in ASCII, without a user, and a path without blanks; correct "
                "it, or send the image in base64"
            )
        if not self._hosts.allow(link):
            raise FetchError(
                "its host is none of those that this server's knob image_url_hosts names; send the image in base64"
            )
        return link

    async def fetch(self, link: ImageLink, most: int) -> bytearray:
        """Return the file of a link that `check` returned. most: how many bytes it may have. Raises `FetchError`."""
        async with self._places:
            stream = await self._connect(link, await self._addresses(link))
            try:
                return await read_file(stream, link, most)
            finally:
                await anyio.aclose_forcefully(stream)

    async def _addresses(self, link: ImageLink) -> list[Address]:
        """Return the addresses of a host. Raises `FetchError` if it has none, or one that is not allowed."""
        if not isinstance(link.host, str):
            return [link.host]
        lookup = partial(self._resolve, link.host, link.port)
        try:
            texts = await to_thread.run_sync(lookup, limiter=self._lookups, abandon_on_cancel=True)
            addresses = [read_address(text) for text in texts]
        except (OSError, ValueError):  # UnicodeError is a ValueError
            addresses = []
        if not addresses or not all(self._hosts.allow_address(link, address) for address in addresses):
            # One text for both, because it would tell otherwise which names there are in a private network.
            raise FetchError(
                "its host has no address, or one that is not public; check the URL, or send the image in base64"
            )
        return addresses[:_MOST_ADDRESSES]

    async def _connect(self, link: ImageLink, addresses: Sequence[Address]) -> ByteStream:
        for address in addresses:
            with anyio.move_on_after(_CONNECT_SECONDS):
                try:
                    return await self._open(link, address)
                except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):  # SSLError is an OSError
                    continue
        secure = " over HTTPS" if link.scheme == "https" else ""
        raise FetchError(f"its host cannot be reached{secure}; check the URL, or send the image in base64")

    async def _open(self, link: ImageLink, address: Address) -> ByteStream:
        stream = await anyio.connect_tcp(str(address), link.port)
        if link.scheme == "http":
            return stream
        try:
            if self._tls is None:
                self._tls = self._make_tls()
            return await TLSStream.wrap(
                stream,
                server_side=False,
                hostname=str(link.host),
                ssl_context=self._tls,
                standard_compatible=False,  # some hosts do not announce the end; HTTP has its own
            )
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise


def _default_tls() -> ssl.SSLContext:
    import httpx2  # it finds the certificates of the machine, and takes a while to load

    return httpx2.create_ssl_context()
