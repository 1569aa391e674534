"""`GET /docs`: the OpenAPI document as a plain page, without scripts or external resources."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "summary{cursor:pointer;padding:.2rem 0}code{overflow-wrap:anywhere}"
    "td{vertical-align:top;padding:.1rem 1rem .1rem 0}"
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Docs:
    """The page for one OpenAPI document, made once."""

    def __init__(self, document: dict[str, Any]) -> None:
        schemas = document["components"]["schemas"]
        operations = [
            _operation(method, path, described, schemas)
            for path, methods in document["paths"].items()
            for method, described in methods.items()
        ]
        title = escape("{title} {version}".format(**document["info"]))
        self._body = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
            f'<h1>{title}</h1><p>For programs: <a href="openapi.json">openapi.json</a></p>{"".join(operations)}'
        ).encode()

    async def show(self, request: Request) -> Response:
        return Response(self._body, headers=_HEADERS, media_type="text/html")


def _operation(method: str, path: str, described: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return an endpoint as a section with its parameters, body fields and statuses."""
    rows = [(one["name"], f"in the {one['in']}", one["schema"]) for one in described.get("parameters", ())]
    body = described.get("requestBody")
    if body is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        required = schemas[name].get("required", ())
        rows += [
            (field, "required" if field in required else "", schema)
            for field, schema in schemas[name]["properties"].items()
        ]
    fields = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{note}<td><code>{escape(json.dumps(schema))}</code>"
        for name, note, schema in rows
    )
    statuses = "".join(
        f"<tr><td>{status}<td>{escape(answer['description'])}" for status, answer in described["responses"].items()
    )
    heading = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {escape(described['summary'])}"
    return f"<details><summary>{heading}</summary><table>{fields}</table><table>{statuses}</table></details>"
