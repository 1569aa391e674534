"""Counts answers by method, path and status, of which there are few whatever clients ask for."""

from __future__ import annotations

from collections import Counter

from starlette.routing import Route
from starlette.types import Scope

OTHER = "other"  # a method that HTTP does not define, or a path that leads nowhere
LEFT = 499  # the client was gone before its answer began
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


class StatusCounts:
    """The counts, updated once an answer has ended: one dictionary entry, nothing while it is being sent."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str, int]] = Counter()  # (method, path as the routes write it, status)

    def add(self, scope: Scope, status: int | None) -> None:
        """Count the answer to a request; `status` is None if none was sent."""
        if scope["type"] == "http":
            method, route = scope.get("method", OTHER), scope.get("route")
            path = route.path if isinstance(route, Route) else _path_of_refused(scope)
            self.answers[method if method in _METHODS else OTHER, path, status or LEFT] += 1


def _path_of_refused(scope: Scope) -> str:
    """The route's path of a request that was refused before it was routed."""
    app = scope.get("app")
    routes = () if app is None else app.routes
    return next((one.path for one in routes if isinstance(one, Route) and one.path == scope["path"]), OTHER)
