"""Which path leads where, and what every request passes on its way."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from aengine.http.chat import Chat
from aengine.http.completions import Completions
from aengine.http.errors import HANDLERS
from aengine.http.generate import Generate
from aengine.http.health import Health
from aengine.http.metrics import Metrics
from aengine.http.models import Models
from aengine.http.origin import OriginMiddleware
from aengine.http.page import Page
from aengine.http.request_id import RequestIdMiddleware
from aengine.http.state import ServerState


def http_app(state: ServerState) -> Starlette:
    """The HTTP side of a server; its engine comes and goes through `state`."""
    generate, completions, chat = Generate(state), Completions(state), Chat(state)
    models, health, metrics = Models(state), Health(state), Metrics(state)
    app = Starlette(
        routes=[
            Route("/generate", generate.create, methods=["POST"]),
            Route("/v1/generate", generate.create, methods=["POST"]),
            Route("/v1/completions", completions.create, methods=["POST"]),
            Route("/v1/chat/completions", chat.create, methods=["POST"]),
            Route("/v1/models", models.list),
            Route("/v1/models/{model:path}", models.retrieve),
            Route("/health", health.health),
            Route("/ready", health.ready),
            Route("/metrics", metrics.show),
            Route("/version", health.version),
            *([Route("/", Page().show)] if state.config.page else []),
        ],
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(OriginMiddleware, allowed=state.config.allowed_origins),
        ],
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False  # the redirect would be built from the client's Host header
    return app
