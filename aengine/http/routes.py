"""The routes of the HTTP layer, and its application."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aengine.http.bodies import message_answers, messages, pooling, requests, responses, sleep
from aengine.http.bodies.responses_api import answer as response_answers
from aengine.http.bodies.responses_api.request import ResponsesRequest
from aengine.http.door.anthropic_errors import OVERLOADED, MessagesErrorBody
from aengine.http.door.door import Door
from aengine.http.door.errors import HANDLERS
from aengine.http.door.paths import ServedPaths
from aengine.http.endpoints.chat import Chat
from aengine.http.endpoints.completions import Completions
from aengine.http.endpoints.docs import Docs
from aengine.http.endpoints.generate import Generate
from aengine.http.endpoints.messages import Messages
from aengine.http.endpoints.models import Models
from aengine.http.endpoints.openapi import Handler, OpenApi, Operation
from aengine.http.endpoints.operators.adapters import Adapters
from aengine.http.endpoints.operators.admin import Admin
from aengine.http.endpoints.operators.health import Health
from aengine.http.endpoints.operators.load import Load
from aengine.http.endpoints.operators.metrics.endpoint import Metrics
from aengine.http.endpoints.operators.sleep import Sleep
from aengine.http.endpoints.page import Page
from aengine.http.endpoints.pooling.embeddings import Embeddings
from aengine.http.endpoints.pooling.scores import Scores
from aengine.http.endpoints.responses.create import Responses
from aengine.http.endpoints.responses.kept import KeptResponseEndpoints
from aengine.http.endpoints.tokenize import Tokens
from aengine.http.state import ServerState
from aengine.text.tokens.info import TokenizerInfo

READS = (400, 408, 413, 415)  # refusals of what reads a body,
SERVES = (503,)  # of what needs the engine,
NAMES = (404,)  # and of what may name a model, or a response
KEPT = "/v1/responses/{response_id}"


def operations(state: ServerState) -> list[Operation]:
    """Every endpoint with its path and its bodies, except the document that describes them all."""
    generate, completions, chat = Generate(state), Completions(state), Chat(state)
    models, health, metrics = Models(state), Health(state), Metrics(state)
    tokens, admin, anthropic = Tokens(state), Admin(state), Messages(state)
    adapters, made, kept = Adapters(state), Responses(state), KeptResponseEndpoints(state)
    embeddings, scores = Embeddings(state), Scores(state)
    load, sleeping = Load(state), Sleep(state)
    all_three = (*READS, *NAMES, *SERVES)
    generated = (responses.Generated, requests.GenerateRequest, True, all_three)
    completed = (responses.CompletionBody, requests.CompletionRequest, True, all_three)
    chatted = (responses.ChatBody, requests.ChatRequest, True, all_three)
    nothing_else: dict[int, Any] = {}
    in_its_form = (nothing_else, MessagesErrorBody)
    messaged = (message_answers.MessageBody, messages.MessagesRequest, True, (*all_three, OVERLOADED), *in_its_form)
    counted = (message_answers.TokenCount, messages.CountTokensRequest, False, all_three, *in_its_form)
    responded = (response_answers.ResponseBody, ResponsesRequest, True, all_three)
    measured = (response_answers.InputTokens, ResponsesRequest, False, all_three)
    reread = (response_answers.ResponseBody, None, False, (400, *NAMES))
    deleted = (response_answers.DeletedResponse, None, False, NAMES)
    items = (response_answers.InputItemList, None, False, (400, *NAMES))
    paging = {"limit": "integer", "order": "string", "after": "string"}
    embedded = (pooling.EmbeddingBody, pooling.EmbeddingRequest, False, all_three)
    classified = (pooling.ClassifyBody, pooling.ClassifyRequest, False, all_three)
    scored = (pooling.ScoreBody, pooling.ScoreRequest, False, all_three)
    ranked = (pooling.RerankBody, pooling.RerankRequest, False, all_three)
    tokenized = (responses.Tokenized, requests.TokenizeRequest, False, all_three)
    detokenized = (responses.Detokenized, requests.DetokenizeRequest, False, all_three)
    settings = (TokenizerInfo, None, False, (*NAMES, *SERVES))
    aborted = (responses.Aborted, requests.AbortRequest, False, READS)
    flushed = (responses.Flushed, None, False, SERVES)
    loaded = (None, requests.LoadAdapterRequest, False, all_three)
    unloaded = (None, requests.UnloadAdapterRequest, False, all_three)
    slept = (sleep.SleepState, None, False, (400, *NAMES, *SERVES))
    asleep = (sleep.SleepState, None, False, SERVES)
    reloaded = (sleep.Reloaded, sleep.ReloadRequest, False, all_three)
    how = {"level": "integer", "mode": "string"}
    listed = (responses.ModelList, None, False, SERVES)
    named = (responses.ModelCard, None, False, (*NAMES, *SERVES))
    sound = (responses.HealthStatus, None, False, (), {503: responses.HealthStatus})
    server_load = (responses.ServerLoad, None, False, SERVES)
    worker_loaded = (list[responses.WorkerLoad], None, False, SERVES)
    rank_loaded = (responses.LoadList, None, False, SERVES)
    ready = (responses.Readiness, None, False, (), {503: responses.Readiness})
    return [
        Operation("POST", "/generate", generate.create, "Continue a prompt; streams by default.", *generated),
        Operation("POST", "/v1/generate", generate.create, "The same as /generate.", *generated),
        Operation("POST", "/v1/completions", completions.create, "Continue prompts, as OpenAI has it.", *completed),
        Operation("POST", "/v1/chat/completions", chat.create, "The assistant's next message.", *chatted),
        Operation("POST", "/v1/messages", anthropic.create, "The same, as Anthropic has it.", *messaged),
        Operation("POST", "/v1/messages/count_tokens", anthropic.count_tokens, "The length of its prompt.", *counted),
        Operation("POST", "/v1/responses", made.create, "A response to a conversation's items.", *responded),
        Operation("POST", "/v1/responses/input_tokens", made.count, "The length of its prompt.", *measured),
        Operation("GET", KEPT, kept.retrieve, "A response that is kept.", *reread, query={"stream": "boolean"}),
        Operation("DELETE", KEPT, kept.delete, "Forget a response that is kept.", *deleted),
        Operation("GET", f"{KEPT}/input_items", kept.input_items, "What it answers.", *items, query=paging),
        Operation("POST", "/v1/embeddings", embeddings.create, "A vector of each text.", *embedded),
        Operation("POST", "/classify", embeddings.classify, "The class of each text.", *classified),
        Operation("POST", "/score", scores.score, "How well texts go together, pair by pair.", *scored),
        Operation("POST", "/v1/score", scores.score, "The same as /score.", *scored),
        Operation("POST", "/rerank", scores.rerank, "Documents by how well they suit a query.", *ranked),
        Operation("POST", "/v1/rerank", scores.rerank, "The same as /rerank.", *ranked),
        Operation("POST", "/v2/rerank", scores.rerank, "The same as /rerank.", *ranked),
        Operation("POST", "/tokenize", tokens.tokenize, "The token ids of a prompt or a chat.", *tokenized),
        Operation("POST", "/detokenize", tokens.detokenize, "The text of token ids.", *detokenized),
        Operation("GET", "/tokenizer_info", tokens.info, "The tokenizer's settings.", *settings),
        Operation("POST", "/abort", admin.abort, "End a request by its id.", *aborted),
        Operation("POST", "/flush_cache", admin.flush_cache, "Forget cached prefixes.", *flushed),
        Operation("POST", "/reset_prefix_cache", admin.flush_cache, "The same as /flush_cache, as in vLLM.", *flushed),
        Operation("POST", "/v1/load_lora_adapter", adapters.load, "Load an adapter.", *loaded),
        Operation("POST", "/v1/unload_lora_adapter", adapters.unload, "Unload an adapter.", *unloaded),
        Operation("POST", "/sleep", sleeping.sleep, "Give the device's memory back.", *slept, query=how),
        Operation("POST", "/wake_up", sleeping.wake_up, "Take it again, and serve.", *slept),
        Operation("GET", "/is_sleeping", sleeping.is_sleeping, "Whether the engine sleeps.", *asleep),
        Operation("POST", "/reload", sleeping.reload, "Read other weights over those that are loaded.", *reloaded),
        Operation("GET", "/v1/models", models.list, "What is served.", *listed),
        Operation("GET", "/v1/models/{model:path}", models.retrieve, "One model.", *named),
        Operation("GET", "/health", health.health, "Whether requests are served, and why not.", *sound),
        Operation("GET", "/ping", health.health, "The same as /health, as in vLLM.", *sound),
        Operation("GET", "/ready", health.ready, "Whether a request would be taken up.", *ready),
        Operation("GET", "/metrics", metrics.show, "What is counted, for Prometheus."),
        Operation("GET", "/load", load.server_load, "How many requests there are, as in vLLM.", *server_load),
        Operation("GET", "/get_load", load.get_load, "The same with tokens, as in SGLang.", *worker_loaded),
        Operation("GET", "/v1/loads", load.loads, "The same in SGLang's newer words.", *rank_loaded),
        Operation("GET", "/version", health.version, "Which aengine this is.", responses.Version),
    ]


def http_app(state: ServerState) -> Starlette:
    """The HTTP side of a server; its engine comes and goes through `state`."""
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
        middleware=[Middleware(Door, config=state.config, paths=paths)],
        exception_handlers={**HANDLERS, 404: paths.no_such_path, 405: paths.no_such_method},
    )
    app.router.redirect_slashes = False  # the redirect would be built from the client's Host header
    return app


async def _not_found(request: Request) -> Response:
    raise HTTPException(404)


# Else it would be a response of that id, and the answer that such are not posted.
_NO_COMPACTION = Route("/v1/responses/compact", _not_found, methods=["POST"])


def _by_method(handlers: dict[str, Handler]) -> Handler:
    """The handler of a path; a route of its own for each method would not know of the others' in its 405."""
    if len(handlers) == 1:
        return next(iter(handlers.values()))

    async def handle(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](request)

    return handle
