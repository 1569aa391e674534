"""`GET /openapi.json`: the OpenAPI document of every endpoint, generated from the structs of its bodies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import aengine
from aengine.http.entry.auth import OPEN_PATHS
from aengine.http.entry.errors import OVERLOADED
from aengine.http.operation import Operation
from aengine.http.streams import sse

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
_REFUSALS = {
    400: "The body cannot be read, or has an invalid value; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "Requests from this web page or to this `Host` are not allowed.",
    404: "The model is not served, the response is not kept, or the feature is switched off.",
    408: "The body took too long to arrive.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    503: "The server is loading or shutting down, or its queue is full; try again after `Retry-After` seconds.",
    OVERLOADED: "The queue is full; try again after `Retry-After` seconds.",
}


class OpenApi:
    """The endpoint that serves the document, which is made once."""

    def __init__(self, operations: Sequence[Operation], *, secured: bool) -> None:
        self.document = document(operations, secured=secured)
        self._encoded = sse.encode(self.document)

    async def show(self, request: Request) -> Response:
        return Response(self._encoded, media_type=JSON)


def document(operations: Sequence[Operation], *, secured: bool) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of the operations. secured: whether the server requires keys."""
    structs = {
        struct
        for operation in operations
        for struct in (operation.body, operation.answer, operation.error, *operation.other_answers.values())
        if struct is not None
    }
    ordered = tuple(sorted(structs, key=lambda struct: str(struct.__name__)))
    references, schemas = _components(ordered)
    schema_of = dict(zip(ordered, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _operation(operation, schema_of, secured and operation.path not in OPEN_PATHS)
        paths.setdefault(operation.template, {})[operation.method.lower()] = described
    components: dict[str, Any] = {"schemas": schemas}
    if secured:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "aengine", "version": aengine.__version__},
        "paths": paths,
        "components": components,
    }


@functools.lru_cache(4)
def _components(structs: tuple[Any, ...]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return references to the structs and their schemas. This takes 30 ms, so it is done once a process."""
    return msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")


def _operation(operation: Operation, schema_of: dict[Any, Any], secured: bool) -> dict[str, Any]:
    error = schema_of[operation.error]
    refusals = {403, *operation.refusals, *({401} if secured else ())}
    answers = {status: _answer(_REFUSALS[status], {JSON: error}) for status in refusals}
    content: dict[str, Any] = {TEXT: {"type": "string"}} if operation.answer is None else {}
    if operation.answer is not None:
        content[JSON] = schema_of[operation.answer]
    if operation.streams:
        content[EVENTS] = {"type": "object", "properties": {"data": {"type": "string"}}}  # each event
    answers[200] = _answer(operation.summary, content)
    for status, struct in operation.other_answers.items():
        answers[status] = _answer("Not available now; the body has the reason.", {JSON: schema_of[struct]})
    described: dict[str, Any] = {
        "operationId": f"{operation.method} {operation.path}",
        "summary": operation.summary,
        "responses": {str(status): answers[status] for status in sorted(answers)},
    }
    names = [part[1:-1] for part in operation.template.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": kind}}
        for name, kind in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of[operation.body]}}}
    if secured:
        described["security"] = [{"key": []}, {"anthropic_key": []}]
    return described


def _answer(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in content.items()}}
