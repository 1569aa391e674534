"""`GET /`: a page with a chat and a live view of the engine, in one self-contained document.

Its parts are in `page/` and are joined when the server starts. The page is the same for everyone and holds no data: it
fetches everything from the API, with the key that its reader enters.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_PARTS = Path(__file__).parent / "page"
_STYLES = tuple(f"styles/{name}.css" for name in ("base", "chat", "prose", "panel", "conversations", "small"))
_MARKDOWN = (
    *("entities", "links", "inline", "emphasis", "blocks", "table", "languages", "code", "document", "render", "prose"),
)
# In the order of their dependencies; together they are one module.
_SCRIPTS = (
    *("dom.js", "api.js"),
    *(f"markdown/{name}.js" for name in _MARKDOWN),
    *(f"conversations/{name}.js" for name in ("tree", "images", "storage", "exchange")),
    *(f"chat/{name}.js" for name in ("scroll", "request", "message", "meter", "chat", "composer", "attach")),
    *(f"panel/{name}.js" for name in ("models", "settings", "engine")),
    *("conversations/list.js", "start.js"),
)


class Page:
    """The page and its headers, made once."""

    def __init__(self) -> None:
        style = "".join(map(_read, _STYLES))
        script = "".join(map(_read, _SCRIPTS))
        self._body = _read("page.html").replace("{{style}}", style).replace("{{script}}", script).encode()
        self._etag = f'"{sha256(self._body).hexdigest()[:32]}"'
        self._headers = {
            "Cache-Control": "no-cache",  # revalidated each time, so that a new version shows at once
            "ETag": self._etag,
            "Content-Security-Policy": _policy(style, script),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }

    async def show(self, request: Request) -> Response:
        """Return the page, or 304 if the browser has this version."""
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self._etag in known:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers, media_type="text/html")


def _read(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy. It allows only this style and script, and requests to this server."""
    rules = {
        "default-src": "'none'",
        "script-src": _source(script),
        "style-src": _source(style),
        "img-src": "data: blob:",  # the icon, and images of messages
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
