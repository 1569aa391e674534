"""Which path leads where, and what every request passes on its way."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from aengine.http.bodies import answers, requests
from aengine.http.door.auth import ApiKeyMiddleware
from aengine.http.door.errors import HANDLERS
from aengine.http.door.origin import OriginMiddleware
from aengine.http.door.paths import PathMiddleware, ServedPaths
from aengine.http.door.request_id import RequestIdMiddleware
from aengine.http.endpoints.admin import Admin
from aengine.http.endpoints.chat import Chat
from aengine.http.endpoints.completions import Completions
from aengine.http.endpoints.generate import Generate
from aengine.http.endpoints.health import Health
from aengine.http.endpoints.metrics import Metrics
from aengine.http.endpoints.models import Models
from aengine.http.endpoints.openapi import OpenApi, Operation
from aengine.http.endpoints.page import Page
from aengine.http.endpoints.tokenize import Tokens
from aengine.http.state import ServerState
from aengine.text.tokens.info import TokenizerInfo

READS = (400, 408, 413, 415)  # refusals of what reads a body,
SERVES = (503,)  # of what needs the engine,
NAMES = (404,)  # and of what may name a model


def operations(state: ServerState) -> list[Operation]:
    """Every endpoint but the description of them all."""
    generate, completions, chat = Generate(state), Completions(state), Chat(state)
    models, health, metrics = Models(state), Health(state), Metrics(state)
    tokens, admin = Tokens(state), Admin(state)
    all_three = (*READS, *NAMES, *SERVES)
    generated = (answers.Generated, requests.GenerateRequest, True, all_three)
    completed = (answers.CompletionBody, requests.CompletionRequest, True, all_three)
    chatted = (answers.ChatBody, requests.ChatRequest, True, all_three)
    tokenized = (answers.Tokenized, requests.TokenizeRequest, False, all_three)
    detokenized = (answers.Detokenized, requests.DetokenizeRequest, False, all_three)
    settings = (TokenizerInfo, None, False, (*NAMES, *SERVES))
    aborted = (answers.Aborted, requests.AbortRequest, False, READS)
    flushed = (answers.Flushed, None, False, SERVES)
    listed = (answers.ModelList, None, False, SERVES)
    named = (answers.ModelCard, None, False, (*NAMES, *SERVES))
    sound = (answers.HealthStatus, None, False, (), {503: answers.HealthStatus})
    ready = (answers.Readiness, None, False, (), {503: answers.Readiness})
    return [
        Operation("POST", "/generate", generate.create, "Continue a prompt; streams by default.", *generated),
        Operation("POST", "/v1/generate", generate.create, "The same as /generate.", *generated),
        Operation("POST", "/v1/completions", completions.create, "Continue prompts, as OpenAI has it.", *completed),
        Operation("POST", "/v1/chat/completions", chat.create, "The assistant's next message.", *chatted),
        Operation("POST", "/tokenize", tokens.tokenize, "The token ids of a prompt or a chat.", *tokenized),
        Operation("POST", "/detokenize", tokens.detokenize, "The text of token ids.", *detokenized),
        Operation("GET", "/tokenizer_info", tokens.info, "The tokenizer's settings.", *settings),
        Operation("POST", "/abort", admin.abort, "End a request by its id.", *aborted),
        Operation("POST", "/flush_cache", admin.flush_cache, "Forget cached prefixes.", *flushed),
        Operation("GET", "/v1/models", models.list, "What is served.", *listed),
        Operation("GET", "/v1/models/{model:path}", models.retrieve, "One model.", *named),
        Operation("GET", "/health", health.health, "Whether requests are served, and why not.", *sound),
        Operation("GET", "/ready", health.ready, "Whether a request would be taken up.", *ready),
        Operation("GET", "/metrics", metrics.show, "What is counted, for Prometheus."),
        Operation("GET", "/version", health.version, "Which aengine this is.", answers.Version),
    ]


def http_app(state: ServerState) -> Starlette:
    """The HTTP side of a server; its engine comes and goes through `state`."""
    described = operations(state)
    document = OpenApi(described, secured=bool(state.config.api_keys))
    routes = [Route(one.path, one.handler, methods=[one.method]) for one in described]
    more = [("/openapi.json", document.show), *([("/", Page().show)] if state.config.page else [])]
    paths = ServedPaths([*((one.method, one.path) for one in described), *(("GET", path) for path, _ in more)])
    app = Starlette(
        routes=[*routes, *(Route(path, show) for path, show in more)],
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(OriginMiddleware, allowed=state.config.allowed_origins),
            Middleware(ApiKeyMiddleware, keys=state.config.api_keys),
            Middleware(PathMiddleware, paths=paths),  # behind the keys: they know no path but as it was sent
        ],
        exception_handlers={**HANDLERS, 404: paths.no_such_path, 405: paths.no_such_method},
    )
    app.router.redirect_slashes = False  # the redirect would be built from the client's Host header
    return app
