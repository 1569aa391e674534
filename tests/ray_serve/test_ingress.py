"""Answers that the ingress makes itself equal those of one server."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest

from aengine.config import ServerConfig

pytest.importorskip("ray")
with warnings.catch_warnings():  # of Ray itself
    warnings.simplefilter("ignore", DeprecationWarning)
    from aengine.ray_serve.call import Head
    from aengine.ray_serve.ingress import Forwarder
    from aengine.ray_serve.replica import Accepted
    from aengine.ray_serve.routing.cached_keys import Changes

pytestmark = [pytest.mark.anyio, pytest.mark.ray]


class Answer:
    def __init__(self, scope: dict[str, Any]) -> None:
        self._pieces = self._answer(scope)

    async def _answer(self, scope: dict[str, Any]) -> AsyncGenerator[Accepted | Head, None]:
        yield Accepted("one", Changes())
        yield Head(200, [], scope["method"].encode())

    def __aiter__(self) -> AsyncGenerator[Accepted | Head, None]:
        return self._pieces

    async def __anext__(self) -> Accepted | Head:
        return await anext(self._pieces)

    def cancel(self) -> None:
        pass


class Handle:
    """A handle of engines that answer with the request's method."""

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *, scope: dict[str, Any], **_: Any) -> Answer:
        return Answer(scope)


def client(**knobs: Any) -> httpx2.AsyncClient:
    app: Any = Forwarder(Handle(), ServerConfig(**knobs), 1.0, "ingress")
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost")


async def test_a_preflight_request_needs_no_key() -> None:
    async with client(api_keys=("secret",)) as asked:
        preflight = {"origin": "http://page", "access-control-request-method": "POST"}
        assert (await asked.options("/generate", headers=preflight)).text == "OPTIONS"
        assert (await asked.options("/generate", headers={"origin": "http://page"})).status_code == 401
        assert (await asked.get("/metrics")).status_code == 401
        assert (await asked.get("/v1/models", headers={"x-api-key": "secret"})).text == "GET"


@pytest.mark.parametrize("headers", [{"x-request-id": "mine"}, {"x-request-id": "not usable"}, {}])
async def test_a_refusal_has_a_request_id_for_anthropics_clients(headers: dict[str, str]) -> None:
    async with client(api_keys=("secret",), max_body_bytes=1024) as asked:
        for key, status in (("secret", 413), ("wrong", 401)):
            refused = await asked.post("/v1/messages", content=b" " * 2000, headers={**headers, "x-api-key": key})
            told = refused.json()
            assert (refused.status_code, told["type"]) == (status, "error")
            assert refused.headers.get_list("request-id") == [told["request_id"]]
            assert told["request_id"] == "mine" if headers == {"x-request-id": "mine"} else told["request_id"]
        answer = await asked.post("/v1/messages", content=b"{}", headers={**headers, "x-api-key": "secret"})
        assert "request-id" not in answer.headers  # an engine has its own
