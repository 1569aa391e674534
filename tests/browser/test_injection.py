"""Text from a model, a server or a reader stays text: it creates no element, runs no code and makes no request."""

from __future__ import annotations

import pytest

from aengine.errors import InvalidRequestError
from tests.browser.chromium import Tab
from tests.browser.talking import ENDED, answer, ask, kept, talking_to
from tests.http.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

ATTACKS = [
    '<img src=x onerror="window.hacked=1">',
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    "<svg/onload=window.hacked=1><iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<style>*{display:none}</style><base href=https://evil.example>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "[x](javascript:window.hacked=1)",
    "[x](JaVaScRiPt:window.hacked=1)",
    "[x](\tjava\tscript:window.hacked=1)",
    "[x](data:text/html,<script>parent.hacked=1</script>)",
    "[x](vbscript:window.hacked=1) [y](//evil.example) [z](/v1/models) [w](file:///etc/passwd)",
    "![x](https://evil.example/pixel.png)",
    "```<img src=x onerror=window.hacked=1>\n<script>window.hacked=1</script>\n```",
    "`<script>window.hacked=1</script>` **<b onclick=window.hacked=1>b</b>**",
    "# <img src=x onerror=window.hacked=1>\n- <script>window.hacked=1</script>\n> <iframe src=//evil.example>",
    "&lt;script&gt; &#60;script&#62;",
    "| <script>window.hacked=1</script> |\n|---|\n| <img src=x onerror=window.hacked=1> [x](javascript:alert()) |",
]
FOREIGN = "document.querySelectorAll('#turns :is(script, img, iframe, style, base, object, embed, form, input)').length"
BAD_LINKS = "[...document.links].filter((a) => !/^https?:$/.test(a.protocol) || a.host === location.host).length"
HANDLERS = (
    "[...document.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())"
    ".filter((name) => name.startsWith('on')).length"
)


async def assert_nothing_came_of_it(tab: Tab) -> None:
    assert (
        await tab.evaluate("new Promise((done) => setTimeout(() => done(window.hacked ?? 'nothing'), 50))") == "nothing"
    )
    for count in (FOREIGN, BAD_LINKS, HANDLERS):
        assert await tab.evaluate(count) == 0, count


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
async def test_in_an_answer(tab: Tab, attack: str) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await answer(tab, engine, f"{attack} and **more**")
        await assert_nothing_came_of_it(tab)
        await kept(tab)
        await tab.open(url)  # kept, and shown again
        await tab.text(".prose")
        await assert_nothing_came_of_it(tab)
        if "script>" in attack and "](" not in attack:
            assert "script" in await tab.text(".prose")


async def test_a_link_that_is_refused_stays_readable(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await answer(tab, engine, "[x](javascript:window.hacked=1)")
        assert await tab.text(".prose") == "[x](javascript:window.hacked=1)"


async def test_in_a_question_in_an_error_and_in_the_models_name(tab: Tab) -> None:
    attack = ATTACKS[0]
    engine = FakeEngine(refuse=InvalidRequestError(attack, "x"))
    async with talking_to(engine, tab, served_model_name=attack):
        await ask(tab, attack)
        await tab.until(ENDED)
        assert attack in await tab.text(".asked")
        assert attack in await tab.text(".failure")
        await tab.until("document.querySelector('#model').textContent.includes('onerror')")
        await assert_nothing_came_of_it(tab)
    assert [complaint for complaint in tab.complaints if "400" not in complaint] == []
    tab.complaints.clear()


async def test_the_policy_stops_what_might_slip_through(tab: Tab) -> None:
    """Even code of the page's own could neither run a string, nor parse HTML, nor call elsewhere."""
    async with talking_to(FakeEngine(), tab):
        for attempt in (
            "document.body.innerHTML = '<p>x</p>'",
            "document.body.append(Object.assign(document.createElement('script'), { text: 'window.hacked = 1' }))",
            "fetch('https://evil.example/')",
            "document.body.append(Object.assign(document.createElement('img'), { src: 'http://127.0.0.1:9/x.png' }))",
        ):
            await tab.evaluate(f"(async () => {{ try {{ await ({attempt}); }} catch {{ }} }})()")
        await assert_nothing_came_of_it(tab)
        assert await tab.evaluate("document.body.textContent.length") > 100
    assert len(tab.complaints) >= 3
    assert all("Content Security Policy" in one or "Trusted" in one for one in tab.complaints), tab.complaints
    tab.complaints.clear()
    tab.requested.clear()
