"""The table of all operations, and the function that makes the application from it."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aengine.http.anthropic import messages
from aengine.http.entry.errors import HANDLERS
from aengine.http.entry.middleware import EntryMiddleware
from aengine.http.entry.paths import ServedPaths
from aengine.http.fields.sampling import SamplingRequest
from aengine.http.native import generate, tokenize
from aengine.http.openai import chat, completions, models
from aengine.http.operation import Handler, Operation
from aengine.http.operators import adapters, admin, health, load, metrics, sleep
from aengine.http.operators.docs import Docs
from aengine.http.operators.openapi import OpenApi
from aengine.http.operators.page import Page
from aengine.http.pooling import embeddings, scores
from aengine.http.responses import create
from aengine.http.state import ServerState

OPERATIONS: tuple[Callable[[ServerState], list[Operation]], ...] = (
    generate.operations,
    completions.operations,
    chat.operations,
    messages.operations,
    create.operations,
    embeddings.operations,
    scores.operations,
    tokenize.operations,
    models.operations,
    admin.operations,
    adapters.operations,
    sleep.operations,
    health.operations,
    metrics.operations,
    load.operations,
)


def operations(state: ServerState) -> list[Operation]:
    """Return every operation. The page and the OpenAPI document are routes without an operation."""
    described = [operation for declare in OPERATIONS for operation in declare(state)]
    bodies = [operation.body for operation in described if operation.body is not None]
    state.unknown_fields.add(body for body in bodies if issubclass(body, SamplingRequest))
    return described


def http_app(state: ServerState) -> Starlette:
    """Return the HTTP application of a server. Its endpoints take the engine from `state`."""
    described = operations(state)
    document = OpenApi(described, secured=bool(state.config.api_keys))
    handlers: dict[str, dict[str, Handler]] = {}
    for operation in described:
        handlers.setdefault(operation.path, {})[operation.method] = operation.handler
    routes = [Route(path, _by_method(methods), methods=list(methods)) for path, methods in handlers.items()]
    undescribed: list[tuple[str, Handler]] = [("/openapi.json", document.show), ("/docs", Docs(document.document).show)]
    undescribed += [("/", Page().show)] if state.config.page else []
    served = [
        *((operation.method, operation.path) for operation in described),
        *(("GET", path) for path, _ in undescribed),
    ]
    paths = ServedPaths(served)
    app = Starlette(
        routes=[_NO_COMPACTION, *routes, *(Route(path, show) for path, show in undescribed)],
        middleware=[Middleware(EntryMiddleware, config=state.config, paths=paths)],
        exception_handlers={**HANDLERS, 404: paths.no_such_path, 405: paths.no_such_method},
    )
    app.router.redirect_slashes = False  # a redirect would be built from the client's Host header
    return app


async def _not_found(request: Request) -> Response:
    raise HTTPException(404)


# Answers 404. Without this route `compact` would be taken as the id of a response, and the answer would be 405.
_NO_COMPACTION = Route("/v1/responses/compact", _not_found, methods=["POST"])


def _by_method(handlers: dict[str, Handler]) -> Handler:
    """Return one handler for all methods of a path, so that a 405 lists all of them."""
    if len(handlers) == 1:
        return next(iter(handlers.values()))

    async def handle(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](request)

    return handle
