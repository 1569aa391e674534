"""Which URLs are read, and which hosts and addresses are allowed."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from aengine.errors import ConfigError
from aengine.http.fetching.urls import AllowedHosts, ImageLink, is_public, read_link


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://a.example/cat.png", ImageLink("https", "a.example", 443, "/cat.png")),
        ("HTTP://A.Example.:8080?x=1&y=%2F#top", ImageLink("http", "a.example", 8080, "/?x=1&y=%2F")),
        ("http://a.example", ImageLink("http", "a.example", 80, "/")),
        ("http://a.example/ä%20b.png", ImageLink("http", "a.example", 80, "/%C3%A4%20b.png")),
        ("http://8.8.8.8/x@y", ImageLink("http", ip_address("8.8.8.8"), 80, "/x@y")),
        ("http://[2606:4700::1111]:8080/", ImageLink("http", ip_address("2606:4700::1111"), 8080, "/")),
        ("http://[::ffff:127.0.0.1]/", ImageLink("http", ip_address("127.0.0.1"), 80, "/")),
        ("http://[::ffff:7f00:1]/", ImageLink("http", ip_address("127.0.0.1"), 80, "/")),
    ],
)
def test_well_formed_urls(url: str, expected: ImageLink) -> None:
    assert read_link(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.example/",
        "file:///etc/passwd",
        "//a.example/",
        "http:/a.example/",
        "http:a.example",
        "http:///x",
        "http://user@a.example/",
        "http://a.example:80@10.0.0.1/",
        "http://user:password@a.example/",
        "http://a.example\\@10.0.0.1/",
        "http://a.example\\.evil.example/",
        "http:\\\\a.example/",
        "http://a.example/\\x",
        "http://a.example /",
        " http://a.example/",
        "http://a.example/\r\nHost: b",
        "http://a.example/ HTTP/1.1",
        "http://a.example\t/",
        "http://a.example\x00.b/",
        "http://a.example:0/",
        "http://a.example:65536/",
        "http://a.example:-1/",
        "http://a.example:80:80/",
        "http://a.example:/",
        "http://a..example/",
        "http://.example/",
        "http://%61.example/",
        "http://bücher.example/",
        "http://127。0。0。1/",
        "http://①②⑦.0.0.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://127.1/",
        "http://0177.0.0.1/",
        "http://127.0.0.01/",
        "http://127.0.0.0x1/",
        "http://127.0.0.1.1/",
        "http://a.example.0x/",
        "http://256.0.0.1/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[127.0.0.1]x/",
        "http://[::1/",
        "http://::1/",
        "http://[::1]]/",
        "http://[]/",
        "http://[::ffff:0177.0.0.1]/",
        "http://a.example/" + "x" * 9000,
        f"http://{'a.' * 130}example/",
        "http://a.example/\ud800",
    ],
)
def test_malformed_urls(url: str) -> None:
    assert read_link(url) is None


PRIVATE = [
    *("0.0.0.0", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9", "169.254.169.254"),
    *("168.63.129.16", "172.16.0.1", "192.0.0.192", "192.168.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a00:1"),
    *("64:ff9b::7f00:1", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::"),
    *("fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "5f00::1", "3fff::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("entry", ["*", "*.example", "a.example"])
@pytest.mark.parametrize("address", PRIVATE)
def test_no_name_leads_to_a_private_address(entry: str, address: str) -> None:
    hosts = AllowedHosts([entry, "10.9.9.9"])
    link = ImageLink("http", "a.example", 80, "/")
    assert hosts.allow(link)
    assert not hosts.allow_address(link, ip_address(address))
    assert not hosts.allow(link._replace(host=ip_address(address)))


@pytest.mark.parametrize(
    ("entries", "allowed", "refused"),
    [
        (["a.example"], ["http://a.example/", "https://A.example./x"], ["http://b.a.example", "http://a.example:8080"]),
        (["A.Example:8080"], ["http://a.example:8080/"], ["http://a.example", "https://a.example"]),
        (["a.example:443"], ["https://a.example"], ["http://a.example"]),
        (["a.example"], ["http://a.example:80"], ["http://a.example:443", "https://a.example:80"]),
        (
            ["*.example.org"],
            ["http://a.example.org", "https://b.a.example.org"],
            ["http://example.org", "http://aexample.org", "http://a.example.org.evil", "http://a.example.org:8080"],
        ),
        (["*.example.org:81"], ["http://a.example.org:81"], ["http://a.example.org"]),
        (
            ["*"],
            ["http://a.example", "https://8.8.8.8", "http://[2606:4700::1111]/"],
            ["http://127.0.0.1", "http://[::1]", "http://[::ffff:10.0.0.1]", "http://a.example:22"],
        ),
        (["8.8.8.8"], ["http://8.8.8.8"], ["http://8.8.4.4", "http://8.8.8.8:22"]),
        (
            ["127.0.0.1:81", "[::1]:82", "fd00::1", "[fd00::2]"],
            [
                "http://127.0.0.1:81",
                "http://[::ffff:127.0.0.1]:81",
                "http://[::1]:82",
                "http://[fd00::1]",
                "http://[fd00::2]",
            ],
            ["http://127.0.0.1", "http://[::1]", "http://127.0.0.2:81"],
        ),
    ],
)
def test_hosts_that_are_allowed(entries: list[str], allowed: list[str], refused: list[str]) -> None:
    hosts = AllowedHosts(entries)
    for expected, urls in ((True, allowed), (False, refused)):
        for url in urls:
            link = read_link(url)
            assert link is not None, url
            assert hosts.allow(link) is expected, url


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "http://a.example",
        "a.example/",
        "*.1.2.3.4",
        "*.*",
        "a.*",
        "**",
        "0177.0.0.1",
        "10.0.0.0/8",
        "a:b",
        "u@a.example",
    ],
)
def test_malformed_entries(entry: str) -> None:
    with pytest.raises(ConfigError, match="image_url_hosts: must be names"):
        AllowedHosts([entry])
