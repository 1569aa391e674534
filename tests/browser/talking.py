"""Steps of most page tests: open the page on the test's engine, ask, read the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.types import Fragment, Usage
from tests.browser.chromium import Tab
from tests.http.fake_engine import FakeEngine, FakeStream
from tests.http.serving import hosting, serving

ENDED = "document.querySelector('.turn:last-child').ariaBusy === 'false'"


@asynccontextmanager
async def talking_to(engine: FakeEngine, tab: Tab, **knobs: Any) -> AsyncIterator[str]:
    """The page, open and with its first figures shown; its address."""
    async with serving(engine, **knobs) as server, tab.visiting(server.url):
        await tab.until("document.querySelector('#running').textContent !== '–'")
        yield server.url


@asynccontextmanager
async def demo_page(tab: Tab) -> AsyncIterator[str]:
    """The page, open and before the demo model, which has been loaded; its address."""
    config = EngineConfig(device="cpu", max_num_seqs=8, kv_cache_gib=0.1, progress=False)
    async with hosting(create_app(config, ServerConfig())) as (port, _), tab.visiting(f"http://127.0.0.1:{port}"):
        await tab.until("document.querySelector('#model').textContent.startsWith('aengine-demo')")
        yield f"http://127.0.0.1:{port}"


async def ask(tab: Tab, question: str) -> None:
    await tab.click("#question")
    await tab.write(question)
    await tab.press("Enter")


async def answer(tab: Tab, engine: FakeEngine, text: str, question: str = "hi") -> None:
    """Ask, and have a held engine answer with `text`."""
    await ask(tab, question)
    finish(await engine.next_stream(), text)
    await tab.until(ENDED)


async def kept(tab: Tab) -> None:
    """Wait until what the page keeps has been written: reading waits for writing that began before."""
    await tab.evaluate("""new Promise((done) => {
        indexedDB.open("aengine").onsuccess = ({ target: { result: database } }) => {
            const all = database.transaction(["messages"]).objectStore("messages");
            all.count().onsuccess = () => { database.close(); done(0); };
        };
    })""")


def finish(stream: FakeStream, text: str) -> None:
    stream.put(Fragment(text, (1,), None, "stop", usage=Usage(9, 4, 3)))


class Instead:
    """An application whose answer to one path is another one's."""

    def __init__(self, app: ASGIApp, path: str, other: ASGIApp) -> None:
        self._app, self._path, self._other = app, path, other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._other if scope.get("path") == self._path else self._app)(scope, receive, send)
