"""Checks `Host`: over a loopback connection only `localhost`, IP addresses and the names in `allowed_hosts` are served.

A web page may let its own name resolve to 127.0.0.1 (DNS rebinding); its browser then takes this server for the
page's own, `Origin` and `Host` agree, and nothing but the name tells. By hand, because Starlette's
TrustedHostMiddleware knows neither IP addresses nor which connections are local, and answers in plain text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

from aengine.http.door.errors import HTTPError

_NAME = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:/?#@\[\]]*))(?::\d*)?")


class Hosts:
    """The host names that are served.

    Over other connections than loopback (another address, a Unix socket) every name will do, unless `allowed` names
    some. A request without `Host` comes from no browser.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = {"localhost", "127.0.0.1", "::1", "", *map(_name_of, allowed)}  # no other address stands in it
        self._any = "*" in allowed
        self._everywhere = bool(allowed)

    def refusal(self, scope: Scope) -> HTTPError | None:
        """What answers a request with a foreign `Host`; None where it is none."""
        if self._any:
            return None
        for host in Headers(scope=scope).getlist("host"):
            name = _name_of(host)
            if name not in self._allowed and not _is_address(name) and (self._everywhere or _is_loopback(scope)):
                return HTTPError(
                    403,
                    "host_not_allowed",
                    f"Host: {host[:100]!r} is none of this server's names: they are localhost, IP addresses, and what "
                    "the knob allowed_hosts names (--allowed-hosts, AENGINE_ALLOWED_HOSTS)",
                )
        return None


def _name_of(host: str) -> str | None:
    """The name or address without the port; None where it is neither."""
    found = _NAME.fullmatch(host.strip().lower())
    return None if found is None else found["address"] or (found["name"] or "").removesuffix(".")


def _is_address(name: str | None) -> bool:
    try:
        ip_address(name or "")
    except ValueError:
        return False
    return True


def _is_loopback(scope: Scope) -> bool:
    """Whether the address that the client connected to is one that only this machine can reach."""
    try:
        address = ip_address((scope.get("server") or ("",))[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
