"""Fetching files from hosts that obey, lie, drip, or lead elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import os
import ssl
from collections.abc import Sequence

import pytest
import trustme

from aengine.http.fetching import exchange
from aengine.http.fetching.exchange import FetchError
from aengine.http.fetching.fetcher import ImageFetcher
from tests.http.fetching.hosts import FileHost, answer, hosting_files

pytestmark = pytest.mark.anyio

MOST = 100_000
SECRET = b"the body of an internal service"


class Names:
    """A resolver that gives the next list of addresses at each lookup."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = [*answers]
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if not (found := self.answers.pop(0)):
            raise OSError("no such name: 10.1.2.3")
        return found


async def fetch(url: str, *hosts: str, names: Names | None = None, tls: ssl.SSLContext | None = None) -> bytes:
    def make() -> ssl.SSLContext:
        return tls or ssl.create_default_context()

    fetcher = ImageFetcher(hosts, resolve=names or Names(), tls=make)
    return bytes(await fetcher.fetch(fetcher.check(url), MOST))


async def fetch_of(script: bytes) -> bytes:
    """Fetch what a host answers."""
    async with hosting_files(script) as host:
        return await fetch(f"http://127.0.0.1:{host.port}/a.png", f"127.0.0.1:{host.port}")


async def refused_of(script: bytes) -> str:
    """Return the error about a host's answer."""
    with pytest.raises(FetchError) as caught:
        await fetch_of(script)
    text = str(caught.value)
    assert caught.value.__cause__ is None
    assert "127.0.0.1" not in text
    assert "a.png" not in text
    assert SECRET.decode() not in text
    return text


async def test_the_request_carries_nothing_but_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with hosting_files(answer(b"one", "Set-Cookie: a=b")) as host:
        entries = (f"images.test:{host.port}", f"127.0.0.1:{host.port}")
        fetcher = ImageFetcher(entries, resolve=Names(["127.0.0.1"], ["127.0.0.1"]))
        for _ in range(2):  # the second one has no cookie
            link = fetcher.check(f"http://Images.Test:{host.port}/a%20b.png?c=/../d#e")
            assert await fetcher.fetch(link, MOST) == b"one"
        head = (
            f"GET /a%20b.png?c=/../d HTTP/1.1\r\nHost: images.test:{host.port}\r\nUser-Agent: aengine\r\n"
            "Accept: image/png, image/jpeg, image/webp, image/gif\r\nAccept-Encoding: identity\r\n"
            "Connection: close\r\n\r\n"
        )
        assert host.requests == [head.encode()] * 2


@pytest.mark.parametrize(
    "script",
    [
        answer(b"one"),
        answer(b"one", "Content-Encoding: identity"),
        b"HTTP/1.1 200 OK\r\n\r\none",
        b"HTTP/1.0 200 OK\r\n\r\none",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(b"one"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n2\r\nne\r\n0\r\n\r\n",
        answer(b"one and more", length=3),
    ],
)
async def test_forms_of_answers(script: bytes) -> None:
    assert await fetch_of(script) == b"one"


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = os.urandom(MOST + 1)
COMPRESSED = "is too large: all images of a request that are fetched share the server's max_body_bytes; make it smaller"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (answer(SECRET, status="404 Not Found"), "its host answered with status 404; check the URL"),
        (answer(SECRET, status="206 Partial Content"), "its host answered with status 206"),
        (
            answer(SECRET, "Location: http://10.0.0.1/", status="302 Found"),
            "its host redirects elsewhere, which is not",
        ),
        (answer(gzip.compress(SECRET), "Content-Encoding: gzip"), "its host sends it compressed, which is not read"),
        (answer(SECRET, "Content-Encoding: identity, br"), "its host sends it compressed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "invalid or incomplete HTTP"),
        (answer(LARGE), "is too large"),
        (answer(b"", length=2**60), "is too large"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + LARGE, "is too large"),
        (CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(LARGE), LARGE), "is too large"),
        (CHUNKED + b"fffffffffffffffff\r\n", "invalid or incomplete HTTP"),
        (CHUNKED + b"-1\r\n", "invalid or incomplete HTTP"),
        (CHUNKED + b"1\r\na\r\n" * 5000 + b"0\r\n\r\n", "too many small pieces"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5000 + answer(b"one"), "too many small pieces"),
        (answer(b"one", length=4), "invalid or incomplete HTTP"),
        (answer(b"one", "Content-Length: 4"), "invalid or incomplete HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\none", "invalid or incomplete HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000, "invalid or incomplete HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a:b\r\n" * 7000 + b"\r\none", "invalid or incomplete HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\none", "invalid or incomplete HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "invalid or incomplete HTTP"),
        (b"SSH-2.0-OpenSSH_9.9 " + SECRET + b"\r\n", "invalid or incomplete HTTP"),
        (b"", "invalid or incomplete HTTP"),
    ],
)
async def test_answers_that_are_refused(script: bytes, text: str) -> None:
    assert text in await refused_of(script)


async def test_a_name_is_resolved_once_and_the_checked_address_is_connected_to() -> None:
    async with hosting_files(answer(b"one")) as host:
        entries = (f"images.test:{host.port}", f"127.0.0.1:{host.port}")
        names = Names(["::ffff:127.0.0.1"], ["127.0.0.2"])
        assert await fetch(f"http://images.test:{host.port}/", *entries, names=names) == b"one"
        assert names.asked == [("images.test", host.port)]


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["169.254.169.254"],
        ["fe80::1%eth0"],
        ["8.8.8.8", "127.0.0.1"],  # one of them is not public
        [],
        ["x"],
    ],
)
async def test_names_that_lead_to_no_public_address(addresses: list[str]) -> None:
    async with hosting_files(answer(SECRET)) as host:
        url = f"http://images.test:{host.port}/"
        with pytest.raises(FetchError) as caught:
            await fetch(url, f"images.test:{host.port}", "127.0.0.1:1", names=Names(addresses))
        assert str(caught.value).startswith("its host has no address, or one that is not public; check the URL")
        assert not host.connected.is_set()


async def test_the_next_address_is_tried() -> None:
    async with hosting_files(answer(b"one")) as host:
        port = host.port
        names = Names(["127.0.0.2", "127.0.0.1"])
        entries = (f"images.test:{port}", f"127.0.0.1:{port}", f"127.0.0.2:{port}")
        assert await fetch(f"http://images.test:{port}/", *entries, names=names) == b"one"
        with pytest.raises(FetchError, match="its host cannot be reached; check the URL"):
            await fetch(f"http://images.test:{port}/", *entries, names=Names(["127.0.0.2"]))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def host_context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


async def fetch_secure(authority: trustme.CA, host: FileHost) -> bytes:
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    entries = (f"images.test:{host.port}", f"127.0.0.1:{host.port}")
    return await fetch(f"https://images.test:{host.port}/", *entries, names=Names(["127.0.0.1"]), tls=trusted)


async def test_https_has_the_name_of_the_url(authority: trustme.CA) -> None:
    async with hosting_files(answer(b"one"), host_context(authority, "images.test")) as host:
        assert await fetch_secure(authority, host) == b"one"
        assert host.names == ["images.test"]
        assert f"Host: images.test:{host.port}\r\n".encode() in host.requests[0]


async def test_https_with_a_certificate_of_another_name(authority: trustme.CA) -> None:
    async with hosting_files(answer(SECRET), host_context(authority, "127.0.0.1", "other.test")) as host:
        with pytest.raises(FetchError, match="cannot be reached over HTTPS"):
            await fetch_secure(authority, host)
        assert not host.requests


async def test_plain_http_on_a_port_of_https(authority: trustme.CA) -> None:
    async with hosting_files(answer(SECRET)) as host:
        with pytest.raises(FetchError, match="cannot be reached over HTTPS"):
            await fetch_secure(authority, host)


async def test_other_tasks_run_between_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_READ", 2**20)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with hosting_files(CHUNKED + b"1\r\na\r\n" * 4000 + b"0\r\n\r\n") as host:
        counting = asyncio.create_task(count())
        await fetch(f"http://127.0.0.1:{host.port}/", f"127.0.0.1:{host.port}")
        counting.cancel()
    assert turns > 60
