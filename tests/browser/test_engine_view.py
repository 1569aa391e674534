"""The live view: the engine's own figures, once a second, while it is visible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from starlette.responses import PlainTextResponse

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.ray_serve.all_replicas import merge_metrics
from tests.browser.chromium import Tab
from tests.browser.talking import Instead, talking_to
from tests.http.fake_engine import IDLE, FakeEngine
from tests.http.serving import hosting, serving

pytestmark = pytest.mark.anyio


def shows(selector: str, text: str) -> str:
    return f"document.querySelector({selector!r}).textContent === {text!r}"


async def test_figures_move_with_the_engine(tab: Tab) -> None:
    engine = FakeEngine()
    async with talking_to(engine, tab):
        for selector, text in {
            "#running": "0",
            "#waiting": "0",
            "#hit-rate": "25 %",
            "#pages-used": "0",
            "#pages-cached": "9",
            "#pages-free": "90",
            "#model-name": "fake",
            "#model-context": " · 64 tokens of context",
        }.items():
            await tab.until(shows(selector, text))
        engine.numbers = msgspec.structs.replace(
            IDLE, running=3, waiting=1200, pages_used=33, pages_cached=22, pages_free=44, generated_tokens=5020
        )
        await tab.until(shows("#waiting", "1,200"))
        assert await tab.text("#running") == "3"
        assert await tab.evaluate("document.querySelector('#pages').ariaLabel") == (
            "KV pages: 33 used, 22 cached, 44 free of 99"
        )
        widths = "['used', 'cached'].map((one) => document.querySelector(`#bar-${one}`).offsetWidth)"
        bar = await tab.evaluate("document.querySelector('#pages').clientWidth")
        assert [round(3 * width / bar) for width in await tab.evaluate(widths)] == [1, 1]


async def test_what_was_accepted_shows_if_a_proposer_runs(tab: Tab) -> None:
    engine = FakeEngine()
    async with talking_to(engine, tab):
        assert await tab.evaluate("document.querySelector('#speculation').offsetHeight") == 0
        engine.numbers = msgspec.structs.replace(
            IDLE, speculation="mtp", drafted_tokens=300, accepted_tokens=160, verified_rows=100
        )
        await tab.until(shows("#accepted", "53 %"))
        assert await tab.text("#accepted-length") == "2.60"
        assert await tab.evaluate("document.querySelector('#speculation').offsetHeight") > 0


async def test_the_rate_is_that_of_the_last_second_and_is_drawn(tab: Tab) -> None:
    engine = FakeEngine()
    async with talking_to(engine, tab):
        await tab.until(shows("#rate", "0"))
        engine.numbers = msgspec.structs.replace(IDLE, generated_tokens=IDLE.generated_tokens + 500)
        rate = await tab.until("(rate => rate > 20 && rate)(Number(document.querySelector('#rate').textContent))")
        assert rate <= 500
        await tab.until(shows("#rate", "0"))
        assert float((await tab.text("#rates-peak")).removeprefix("peak ")) > 20
        assert (await tab.evaluate("document.querySelector('#rates-line').getAttribute('d')")).count("L") >= 2


async def test_another_engine_behind_the_address_gives_no_negative_rate(tab: Tab) -> None:
    engine = FakeEngine()
    engine.numbers = msgspec.structs.replace(IDLE, generated_tokens=9000)
    async with talking_to(engine, tab):
        await tab.until(shows("#rate", "0"))
        engine.numbers = msgspec.structs.replace(IDLE, generated_tokens=1)
        await tab.until(shows("#rate", "–"))
        await tab.until(shows("#rate", "0"))


def figures(running: int, prompt_tokens: int, cached_tokens: int, used: int) -> str:
    samples = {
        "aengine_ready": 1,
        "aengine_requests_running": running,
        "aengine_requests_waiting": 0,
        "aengine_prompt_tokens_total": prompt_tokens,
        "aengine_cached_tokens_total": cached_tokens,
        "aengine_generated_tokens_total": 7,
        "aengine_kv_pages": 99,
        "aengine_kv_pages_used": used,
        "aengine_kv_pages_cached": 9,
        "aengine_kv_pages_free": 90 - used,
        'aengine_answers_total{status="200"}': 5,
    }
    return "# HELP aengine_ready Whether.\n" + "".join(f"{name} {value}\n" for name, value in samples.items())


async def test_figures_of_several_replicas_are_put_together(tab: Tab) -> None:
    text = merge_metrics({"one": figures(1200, 900, 450, 11), "two": figures(34, 100, 0, 22)})
    inside = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: FakeEngine())
    app = Instead(inside, "/metrics", PlainTextResponse(text))
    async with hosting(app) as (port, _), tab.visiting(f"http://127.0.0.1:{port}"):
        await tab.until(shows("#running", "1,234"))
        assert await tab.text("#hit-rate") == "45 %"
        assert await tab.text("#pages-used") == "33"
        assert await tab.evaluate("document.querySelector('#engine-note').hidden")
        await tab.until(shows("#rate", "0"))


async def test_nothing_is_asked_for_a_tab_that_nobody_sees(tab: Tab) -> None:
    hidden = "window.unseen = false; Object.defineProperty(document, 'hidden', { get: () => window.unseen })"
    await tab.send("Page.addScriptToEvaluateOnNewDocument", source=hidden)

    def looks() -> int:
        return sum(url.endswith("/metrics") for url in tab.requested)

    async with talking_to(FakeEngine(), tab):
        await tab.evaluate("window.unseen = true; document.dispatchEvent(new Event('visibilitychange'))")
        await tab.evaluate("new Promise((resolve) => setTimeout(resolve, 1200))")  # the look that may be on its way
        before = looks()
        await tab.evaluate("new Promise((resolve) => setTimeout(resolve, 1500))")
        assert looks() == before
        await tab.evaluate("window.unseen = false; document.dispatchEvent(new Event('visibilitychange'))")
        await tab.until("performance.getEntriesByType('resource').length > 0 && " + shows("#rate", "0"))
        assert looks() > before


class SlowEngine(FakeEngine):
    """Loads until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[FakeEngine]:
        await self.let_go.wait()
        yield self


async def test_while_the_model_loads_the_page_says_so(tab: Tab) -> None:
    engine = SlowEngine()
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine.loading())
    async with hosting(app) as (port, _), tab.visiting(f"http://127.0.0.1:{port}"):
        await tab.until("document.querySelector('#engine-note').textContent === 'the model is still loading'")
        engine.let_go.set()
        await tab.until("document.querySelector('#engine-note').hidden")
        await tab.until("document.querySelector('#model').textContent.startsWith('fake')")


async def test_a_server_that_went_away_is_told_and_found_again(tab: Tab) -> None:
    async with serving(FakeEngine()) as server:
        await tab.open(server.url)
        await tab.until("document.querySelector('#running').textContent !== '–'")
    await tab.until("document.querySelector('#engine-note').textContent.includes('cannot be reached')")
    assert await tab.text("#running") == "–"
    assert all("ERR_" in complaint or " 503 " in complaint for complaint in tab.complaints)
    tab.complaints.clear()
