"""The API key: the page requests it if the server needs one, and keeps it in the tab only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.http.entry.errors import HTTPError, error_response
from tests.browser.chromium import Tab
from tests.browser.talking import ENDED, ask
from tests.http.fake_engine import FakeEngine
from tests.http.serving import hosting

pytestmark = pytest.mark.anyio

KEY = "sk-of-the-test"
OPEN = "document.querySelector('#key-dialog').open"


class Locked:
    """An application whose every answer but the page needs the key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = scope["type"] == "http" and scope["path"] != "/"
        if closed and Headers(scope=scope).get("authorization") != f"Bearer {KEY}":
            refusal = error_response(HTTPError(401, "invalid_api_key", "an API key is needed"))
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


@asynccontextmanager
async def locked(tab: Tab) -> AsyncIterator[str]:
    engine = FakeEngine()
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    async with hosting(Locked(app)) as (port, _), tab.visiting(f"http://127.0.0.1:{port}"):
        await tab.until(OPEN)
        yield f"http://127.0.0.1:{port}"
    assert [complaint for complaint in tab.complaints if "401" not in complaint] == []
    tab.complaints.clear()


async def give(tab: Tab, key: str) -> None:
    await tab.click("#key")
    await tab.write(key)
    await tab.press("Enter")


async def test_a_key_is_asked_for_until_it_is_the_right_one(tab: Tab) -> None:
    async with locked(tab) as url:
        assert "asks for a key" in await tab.text("#key-reason")
        await give(tab, "sk-wrong")
        await tab.until("document.querySelector('#key-reason').textContent.includes('does not know')")
        await give(tab, KEY)
        await tab.until("document.querySelector('#running').textContent === '0'")
        await ask(tab, "hi")
        await tab.until(ENDED)
        assert "Paris" in await tab.text(".prose")
        await tab.open(url)
        await tab.until("document.querySelector('#running').textContent === '0'")  # no second request for the key


async def test_it_is_kept_in_this_tab_alone(tab: Tab) -> None:
    async with locked(tab):
        await give(tab, KEY)
        await tab.until("document.querySelector('#running').textContent === '0'")
        assert await tab.evaluate("JSON.stringify({ ...localStorage }) + document.cookie + location.href") == (
            "{}" + await tab.evaluate("location.origin + '/'")
        )
        assert KEY in await tab.evaluate("JSON.stringify({ ...sessionStorage })")
        assert KEY not in await tab.evaluate(
            "document.documentElement.outerHTML + document.querySelector('#key').value"
        )


async def test_who_gives_none_is_asked_again_with_the_next_question(tab: Tab) -> None:
    async with locked(tab):
        await tab.press("Escape")
        await tab.until("document.querySelector('#engine-note').textContent.includes('API key')")
        await ask(tab, "hi")
        await tab.until(OPEN)
        await tab.click("#key-cancel")
        await tab.until(ENDED)
        assert "an API key is needed" in await tab.text(".failure")
        await tab.click("#change-key")
        await give(tab, KEY)
        await tab.until("document.querySelector('#running').textContent === '0'")
        await tab.click(".again")
        await tab.until("document.querySelector('.prose').textContent.includes('Paris')")
