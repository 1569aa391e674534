"""Aliases of served paths, and 404s that suggest the nearest path.

A client appends its own path to a configured base URL. So `/v1` may be missing or there twice, and the path may end
with slashes. All of these reach the endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.entry.errors import HTTPError, error_response

_VERSIONS = re.compile(r"/*(?:v1/+){0,2}")
_LONGEST = 100  # characters of a path that are compared or shown


class ServedPaths:
    """The paths of the router and their aliases.

    served: pairs of method and path. A path may end with a parameter, as in `/a/{b:path}`.
    """

    def __init__(self, served: Iterable[tuple[str, str]]) -> None:
        self._methods: dict[str, str] = {}
        for method, path in served:
            self._methods.setdefault(path.partition("{")[0], method)
        self._with_parameter = tuple(path for path in self._methods if path.endswith("/") and path != "/")
        self.exact = self._methods.keys() - set(self._with_parameter)  # those without a parameter

    def canonical(self, path: str) -> str:
        """Return the served path of which this one is an alias, with one `/v1` or none; else `path` itself."""
        if path == "/" or (self._serves(path) and not path.endswith("/")):
            return path
        suffix = _VERSIONS.sub("", path.rstrip("/"), count=1)
        return next(
            (candidate for candidate in (f"/v1/{suffix}", f"/{suffix}") if suffix and self._serves(candidate)), path
        )

    async def no_such_path(self, request: Request, error: Exception) -> Response:
        """Return the 404, with the nearest served path."""
        path = request.scope["path"]
        nearest = self._nearest(path[:_LONGEST].lower())
        hint = f"did you mean {self._methods[nearest]} {nearest}?" if nearest else "GET /openapi.json lists all"
        refusal = f"{request.method} {_printable(path)}: there is no such path here; {hint}"
        return error_response(HTTPError(404, "not_found", refusal))

    async def no_such_method(self, request: Request, error: Exception) -> Response:
        """Return the 405, with the allowed methods."""
        headers = (error.headers or {}) if isinstance(error, HTTPException) else {}
        allowed = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        refusal = f"{request.method} {_printable(request.scope['path'])}: this path takes {allowed} only"
        return error_response(HTTPError(405, "method_not_allowed", refusal), {"Allow": allowed})

    def _nearest(self, path: str) -> str | None:
        """Return a served path that `path` ends with, a similar one, or one that begins with it."""
        like = get_close_matches(path, self._methods, n=1, cutoff=0.75)
        parts = path.rstrip("/").split("/")[1:]
        ends = (self.canonical(f"/{'/'.join(parts[cut:])}") for cut in range(1, len(parts)))
        rest = _VERSIONS.sub("", path.rstrip("/") + "/", count=1)
        longer = (one for one in self._methods if rest and one.startswith((f"/{rest}", f"/v1/{rest}")))
        return next((one for one in (*ends, *like, *longer) if one in self.exact), None)

    def _serves(self, path: str) -> bool:
        if path in self._with_parameter:
            return False
        return path in self._methods or path.startswith(self._with_parameter)


def _printable(path: str) -> str:
    return path[:_LONGEST].encode("unicode_escape").decode()
