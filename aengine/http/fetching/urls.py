"""Reads URLs of images, and decides which hosts and addresses the server may reach.

A URL is parsed once, by the strict grammar here. The result is what is checked and what is fetched, so that no second
parser can read another host out of the same text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import quote

from aengine.errors import ConfigError

Address = IPv4Address | IPv6Address
Host = str | Address

_LONGEST = 8192  # characters of a URL
_BLANK = re.compile(r"[\0- \x7f]")  # and control characters
_PRINTABLE = string.ascii_letters + string.digits + string.punctuation
_HOST = r"\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?"
# No user, no zone of an IPv6 address, and no backslash or percent sign before the path.
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?(?P<target>[/?][!-\"$-\[\]-~]*)?(?:#.*)?",
    re.IGNORECASE | re.DOTALL,
)
_ENTRY = re.compile(rf"(?P<below>\*\.)?(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?", re.IGNORECASE)
# Resolvers read these as IPv4 addresses, in decimal, octal or hexadecimal.
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.DOTALL)
_PORTS = {"http": 80, "https": 443}
_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
# What `is_global` allows, in some versions of Python: metadata of Azure's machines, protocols of the IETF such as the
# metadata of Oracle's machines, and IPv6 addresses with a whole IPv4 address within or for examples.
_NOT_PUBLIC = [*map(ip_network, ("168.63.129.16", "192.0.0.0/24", "192.88.99.0/24", "2002::/16", "3fff::/20"))]


class ImageLink(NamedTuple):
    """A parsed URL."""

    scheme: str
    host: Host  # in lower case, without a final dot
    port: int
    target: str  # path and query, in ASCII

    @property
    def is_usual_port(self) -> bool:
        return self.port == _PORTS[self.scheme]

    @property
    def authority(self) -> str:
        """The value of the header `Host`."""
        host = f"[{self.host}]" if isinstance(self.host, IPv6Address) else str(self.host)
        return host if self.is_usual_port else f"{host}:{self.port}"


def read_link(url: str) -> ImageLink | None:
    """Return the parts of a URL; None if it is malformed."""
    if len(url) > _LONGEST or _BLANK.search(url):
        return None
    try:
        found = _URL.fullmatch(quote(url, safe=_PRINTABLE))
        host = None if found is None else _host(found["host"])
    except ValueError:  # half of a surrogate pair
        return None
    if found is None or host is None:
        return None
    scheme = found["scheme"].lower()
    port = int(found["port"] or _PORTS[scheme])
    target = found["target"] or "/"
    return ImageLink(scheme, host, port, target if target[0] == "/" else f"/{target}") if 0 < port < 2**16 else None


class AllowedHosts:
    """The hosts that a server may fetch images from.

    Entries are names, `*.name` for all names below one, addresses, or `*` for every public host. Each may have a port,
    such as `images.example.org:8080`. Without one it allows the usual port of the scheme. An address that is not public
    is allowed only if it is an entry itself, also when a name leads to it.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises `ConfigError` for an entry of another form."""
        self._any = False
        self._exact: set[tuple[Host, int | None]] = set()
        self._below: set[tuple[str, int | None]] = set()
        for entry in entries:
            self._add(entry)

    def __bool__(self) -> bool:
        return self._any or bool(self._exact or self._below)

    def allow(self, link: ImageLink) -> bool:
        """Whether the host of a link is allowed. For a name, its addresses must be checked as well."""
        host, ports = link.host, _ports(link)
        if isinstance(host, str):
            labels = host.split(".")
            above = {".".join(labels[start:]) for start in range(1, len(labels))}
            if any((name, port) in self._below for name in above for port in ports):
                return True
        elif not self.allow_address(link, host):
            return False
        return (self._any and link.is_usual_port) or any((host, port) in self._exact for port in ports)

    def allow_address(self, link: ImageLink, address: Address) -> bool:
        """Whether the server may connect to an address for a link whose host is allowed."""
        return is_public(address) or any((address, port) in self._exact for port in _ports(link))

    def _add(self, entry: str) -> None:
        if entry == "*":
            self._any = True
            return
        bare = f"[{entry}]" if entry.count(":") > 1 and not entry.startswith("[") else entry
        found = _ENTRY.fullmatch(bare)
        host = None if found is None else _host(found["host"])
        if found is None or host is None or (found["below"] and not isinstance(host, str)):
            raise ConfigError(
                f"image_url_hosts: must be names, *.name, addresses or *, each with an optional :port, got {entry!r}"
            )
        port = None if found["port"] is None else int(found["port"])
        if found["below"] and isinstance(host, str):
            self._below.add((host, port))
        else:
            self._exact.add((host, port))


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet, and of no cloud's metadata."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _UNICAST:
            return False
    other = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not other


def read_address(text: str) -> Address:
    """Return an address; the IPv4 address for one that is mapped to IPv6. Raises ValueError."""
    address = ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _host(text: str) -> Host | None:
    """Return a name in lower case, or an address; None for a malformed one."""
    text = text.lower().removesuffix(".")
    if not text.startswith("[") and not _NUMBER.fullmatch(text):
        return text if len(text) <= 253 else None
    try:
        return read_address(text.strip("[]"))  # of IPv4 addresses it reads four decimal numbers only
    except ValueError:
        return None


def _ports(link: ImageLink) -> tuple[int | None, ...]:
    """Return the ports under which an entry may allow a link; None is an entry without a port."""
    return (link.port, None) if link.is_usual_port else (link.port,)
