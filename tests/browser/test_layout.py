"""Wide and narrow, light and dark, with the keyboard and read aloud."""

from __future__ import annotations

import pytest

from aengine.types import Fragment
from tests.browser.chromium import Tab
from tests.browser.talking import answer, ask, finish, talking_to
from tests.http.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

LOG = "document.querySelector('#log')"
TO_END = f"{LOG}.scrollHeight - {LOG}.scrollTop - {LOG}.clientHeight"
LONG = "\n\n".join(["A line of text that is not short. " * 4] * 30)
WIDE = "```\n" + "x" * 500 + "\n```\n\n" + "y" * 500 + "\n\nhttps://example.org/" + "z" * 500


def is_shown(selector: str) -> str:
    return f"document.querySelector({selector!r}).checkVisibility()"


async def test_wide_shows_chat_and_panel(tab: Tab) -> None:
    async with talking_to(FakeEngine(), tab):
        assert await tab.evaluate(is_shown("#panel"))
        assert not await tab.evaluate(is_shown("#show-panel"))


async def test_narrow_shows_the_panel_on_demand(tab: Tab) -> None:
    await tab.look(390, 844)
    async with talking_to(FakeEngine(), tab):
        assert not await tab.evaluate(is_shown("#panel"))
        await tab.until("/[0-9] tok.s/.test(document.querySelector('#glance').textContent)")
        await tab.click("#show-panel")
        await tab.until(is_shown("#panel"))
        assert await tab.evaluate("document.querySelector('#show-panel').ariaExpanded") == "true"
        await tab.press("Escape")
        await tab.until("!" + is_shown("#panel"))


@pytest.mark.parametrize("width", [320, 390, 900, 1600])
async def test_nothing_sticks_out(tab: Tab, width: int) -> None:
    engine = FakeEngine(held=True)
    await tab.look(width, 700)
    async with talking_to(engine, tab):
        await answer(tab, engine, WIDE, "w" * 400)
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        assert await tab.evaluate(f"{LOG}.scrollWidth - {LOG}.clientWidth") <= 0
        for selector in ("#question", "#send", "#new-chat"):
            box = await tab.evaluate(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
            assert box["right"] <= width
            assert box["bottom"] <= 700


@pytest.mark.parametrize("width", [360, 390])
async def test_a_phone_shows_the_models_name_and_covers_no_text(tab: Tab, width: int) -> None:
    engine = FakeEngine(held=True)
    await tab.look(width, 740)
    async with talking_to(engine, tab, served_model_name="Qwen3-Coder-30B-A3B-Instruct"):
        await answer(tab, engine, LONG)
        name = await tab.evaluate("document.querySelector('#model-name').getBoundingClientRect().toJSON()")
        header = await tab.evaluate("document.querySelector('header').getBoundingClientRect().toJSON()")
        assert await tab.text("#model-name") == "Qwen3-Coder-30B-A3B-Instruct"
        assert (name["height"] > 15, name["bottom"] <= header["bottom"], header["height"] < 70) == (True, True, True)
        shown = "document.elementFromPoint({x}, {y}).closest('#model') !== null"
        for x in (name["left"] + 1, name["right"] - 1):
            assert await tab.evaluate(shown.format(x=x, y=name["top"] + name["height"] / 2))
        await tab.evaluate(f"{LOG}.scrollTop = 100")
        await tab.until(is_shown("#to-end"))
        button = await tab.evaluate("document.querySelector('#to-end').getBoundingClientRect().toJSON()")
        assert button["top"] >= await tab.evaluate(f"{LOG}.getBoundingClientRect().bottom")


async def test_turning_a_phone_keeps_the_end_in_view(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    await tab.look(390, 844)
    async with talking_to(engine, tab):
        await answer(tab, engine, LONG)
        for width, height in ((844, 390), (390, 844)):
            await tab.look(width, height)
            await tab.until(f"innerWidth === {width} && {TO_END} < 2")
        await tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        await tab.evaluate(f"{LOG}.scrollTop = 100")
        await tab.until(is_shown("#to-end"))
        await tab.look(844, 390)
        await tab.until(f"innerWidth === 844 && {TO_END} > 300")


async def test_dark_and_light(tab: Tab) -> None:
    async with talking_to(FakeEngine(), tab):
        brightness = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0]"
        assert await tab.evaluate(brightness) > 200
        await tab.look(1200, 800, dark=True)
        assert await tab.evaluate(brightness) < 60


async def test_the_end_stays_in_view_for_whoever_reads_it(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await ask(tab, "hi")
        stream = await engine.next_stream()
        stream.put(Fragment(LONG, (1,)))
        await tab.until("document.querySelectorAll('.prose p').length === 30")
        assert await tab.evaluate(TO_END) < 2
        await tab.evaluate(f"{LOG}.scrollTop = 100")
        await tab.until(is_shown("#to-end"))
        stream.put(Fragment("\n\n" + LONG, (1,)))
        await tab.until("document.querySelectorAll('.prose p').length === 60")
        assert await tab.evaluate(f"{LOG}.scrollTop") == 100
        await tab.click("#to-end")
        await tab.until("!" + is_shown("#to-end"))
        finish(stream, "\n\nThe end.")
        await tab.until("document.querySelectorAll('.prose p').length === 61")
        assert await tab.evaluate(TO_END) < 2


async def test_the_question_grows_with_its_lines(tab: Tab) -> None:
    height = "document.querySelector('#question').offsetHeight"
    async with talking_to(FakeEngine(), tab):
        await tab.click("#question")
        one = await tab.evaluate(height)
        for _ in range(3):
            await tab.write("line")
            await tab.press("Enter", shift=True)
        await tab.until(f"{height} > {2 * one}")


async def test_everything_that_can_be_used_has_a_name(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await answer(tab, engine, "`a`\n\n```\ncode\n```\n[b](https://example.org)")
        tree = (await tab.send("Accessibility.getFullAXTree"))["nodes"]
    usable = {"button", "textbox", "spinbutton", "combobox", "link", "log", "image", "form", "complementary"}
    found = [(one["role"]["value"], one.get("name", {}).get("value", "")) for one in tree if not one["ignored"]]
    named = {role for role, name in found if role in usable and name}
    assert {"button", "textbox", "spinbutton", "link", "log"} <= named
    assert [role for role, name in found if role in usable and not name and role != "form"] == []


async def test_the_keyboard_reaches_everything_in_order(tab: Tab) -> None:
    async with talking_to(FakeEngine(), tab):
        await tab.click("#question")
        await tab.write("x")
        reached = []
        for _ in range(25):
            await tab.press("Tab")
            reached.append(await tab.evaluate("document.activeElement.id || document.activeElement.name"))
    assert reached[:4] == ["send", "system", "temperature", "top_p"]
    assert reached[reached.index("reset") :][:2] == ["reset", "change-key"]
    assert reached.index("search") < reached.index("import") < reached.index("log")
