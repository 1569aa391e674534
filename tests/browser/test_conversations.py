"""Stored conversations: several, named, searched, deleted, exported, in several tabs, and without storage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aengine.types import Fragment
from tests.browser.chromium import Chromium, Tab
from tests.browser.talking import answer, ask, finish, kept, talking_to
from tests.http.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

TITLES = "[...document.querySelectorAll('#titles .title span')].map((one) => one.textContent)"
CONTENTS = "[...document.querySelectorAll('.turn')].map((one) => one.querySelector('.asked, .prose').textContent)"
SAVED = (
    "window.real = URL.createObjectURL; URL.createObjectURL = (blob) => { window.blob = blob; return real(blob); }; 0"
)
NO_STORAGE = """
    IDBFactory.prototype.open = () => { throw new DOMException("denied", "SecurityError"); };
    for (const name of ["sessionStorage", "localStorage"]) Object.defineProperty(window, name, { get() { throw 1; } });
"""
FULL_STORAGE = """(() => {
    const put = IDBObjectStore.prototype.put;
    const error = { get: () => new DOMException("full", "QuotaExceededError"), configurable: true };
    IDBObjectStore.prototype.put = function (...values) {
        if (window.full && !Object.hasOwn(this.transaction, "error")) {
            Object.defineProperty(this.transaction, "error", error);
            const { transaction } = this;
            queueMicrotask(() => transaction.abort());
        }
        return put.apply(this, values);
    };
})();"""
FIRST, SECOND = "#titles li:nth-child(1)", "#titles li:nth-child(2)"


async def two(tab: Tab, engine: FakeEngine) -> None:
    """A conversation about apples, and one about pears, which is open."""
    await answer(tab, engine, "An apple is <b>red</b>.", "Apples?\nPlease.")
    await tab.click("#new-chat")
    await answer(tab, engine, "A pear is green.", "Pears?")
    await tab.until(f"{TITLES}.length === 2")


async def choose(tab: Tab, item: str, action: str) -> None:
    await tab.click(f"{item} .more")
    await tab.click(f"#menu [value={action}]")


async def test_several_last_and_can_be_named_and_searched(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await two(tab, engine)
        await kept(tab)
        await tab.open(url)
        await tab.until(f"{TITLES}.length === 2")
        assert await tab.evaluate(TITLES) == ["Pears?", "Apples?"]
        await tab.until(f"{CONTENTS}.length === 2")
        assert await tab.evaluate(CONTENTS) == ["Pears?", "A pear is green."]
        await tab.click(f"{SECOND} .title")
        await tab.until(f"{CONTENTS}[1] === 'An apple is <b>red</b>.'")
        assert await tab.text("[aria-current]") == "Apples?"
        await choose(tab, SECOND, "rename")
        await tab.until("document.activeElement.id === 'title'")
        await tab.write("Red <i>fruit")
        await tab.press("Enter")
        await tab.until(f"{TITLES}[1] === 'Red <i>fruit'")
        await answer(tab, engine, "Still.", "More?")  # the newest comes first
        await tab.until(f"{TITLES}[0] === 'Red <i>fruit'")
        for text, found in (("GREEN", ["Pears?"]), ("red <i>", ["Red <i>fruit"]), ("plum", [])):
            await tab.evaluate("document.querySelector('#search').value = ''")
            await tab.click("#search")
            await tab.write(text)
            await tab.until(f"JSON.stringify({TITLES}) === {json.dumps(json.dumps(found, separators=(',', ':')))}")
        assert await tab.text("#no-titles") == "Nothing found."


async def test_deleting_can_be_undone(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await two(tab, engine)
        await choose(tab, FIRST, "delete")
        await tab.until(f"{TITLES}.length === 1 && {CONTENTS}.length === 0")
        assert "Pears?" in await tab.text("#undo")
        await tab.click("#undo-button")
        await tab.until(f"{TITLES}.length === 2")
        await tab.click("#delete-all")
        await tab.until("document.querySelector('#delete-question').textContent === 'Delete all 2 conversations?'")
        await tab.click("#delete-dialog .cancel")
        assert await tab.evaluate(f"{TITLES}.length") == 2
        await tab.click("#delete-all")
        await tab.click("#delete-dialog .primary")
        await tab.until(f"{TITLES}.length === 0")
        await kept(tab)
        await tab.open(url)
        await tab.until("!document.querySelector('#no-titles').hidden")
        assert await tab.evaluate(TITLES) == []


async def test_deleting_ends_an_answer_and_nothing_brings_it_back(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await ask(tab, "hi")
        stream = await engine.next_stream()
        stream.put(Fragment("So far", (1,)))
        await tab.until(f"{TITLES}.length === 1")
        await choose(tab, FIRST, "delete")
        await stream.aborted.wait()
        await tab.until(f"{TITLES}.length === 0")
        await answer(tab, engine, "other", "other")
        await kept(tab)
        await tab.open(url)
        await tab.until(f"{TITLES}.length > 0")
        assert await tab.evaluate(TITLES) == ["other"]


@pytest.mark.parametrize("kind", ["json", "markdown"])
async def test_a_file_brings_back_what_was_written_to_it(tab: Tab, tmp_path: Path, kind: str) -> None:
    engine = FakeEngine(held=True)
    text = "One.\n\n## User\n\n\\## System\n\n```\n# code\n```"
    async with talking_to(engine, tab):
        await answer(tab, engine, text, "Write.")
        shown = await tab.evaluate(CONTENTS)
        await tab.send("Browser.setDownloadBehavior", behavior="deny", browserContextId=tab.context)
        await tab.evaluate(SAVED)
        await choose(tab, FIRST, f"export-{kind}")
        await tab.until("window.blob")
        written = await tab.evaluate("window.blob.text()")
        file = tmp_path / ("talk.json" if kind == "json" else "talk.md")
        file.write_text(written)
        await choose(tab, FIRST, "delete")
        await tab.until(f"{TITLES}.length === 0")
        await tab.choose_file("#import-file", str(file))
        await tab.until(f"{CONTENTS}.length === 2")
        assert await tab.evaluate(CONTENTS) == shown
        assert await tab.evaluate(TITLES) == ["Write."]
        await ask(tab, "And?")
        await engine.next_stream()
        assert [one["content"] for one in engine.chats[-1].messages] == ["Write.", text, "And?"]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.json", "{", "a.json is no JSON."),
        ("a.json", '{"conversations": 5}', "holds no conversations"),
        ("a.md", "nothing", "“## User” begins a question"),
        ("a.json", '[{"messages": [{"role": "user", "content": {"a": 1}, "parent": 7, "id": []}, null, 3]}]', ""),
        ("a.json", '[{"leaf": "x", "messages": [{"role": "user", "id": "x", "parent": "x", "content": "c"}]}]', ""),
        ("a.json", '[{"title": ["<img>"], "messages": [{"role": "assistant", "content": "<img src=x>"}]}]', ""),
    ],
)
async def test_files_of_others_do_no_harm(tab: Tab, tmp_path: Path, name: str, text: str, complaint: str) -> None:
    engine = FakeEngine(held=True)
    (tmp_path / name).write_text(text)
    async with talking_to(engine, tab):
        await tab.choose_file("#import-file", str(tmp_path / name))
        if complaint:
            await tab.until("!document.querySelector('#import-note').hidden")
            assert complaint in await tab.text("#import-note")
        else:
            await tab.until(f"{TITLES}.length === 1 && {CONTENTS}.length === 1")
        assert await tab.evaluate("document.querySelectorAll('#turns img, #titles img').length") == 0
        await tab.click("#new-chat")
        await answer(tab, engine, "fine")


async def test_what_had_come_survives_a_reload_and_goes_on(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await ask(tab, "hi")
        (await engine.next_stream()).put(Fragment("So far", (1,)))
        await tab.until("document.querySelector('.prose').textContent")
        await tab.evaluate("new Promise((done) => setTimeout(done, 1300))")  # it is saved once a second
        await kept(tab)
        await tab.open(url)
        assert await tab.text(".prose") == "So far"
        await tab.click(".go-on")
        finish(await engine.next_stream(), ", so good")
        await tab.until(f"{CONTENTS}[1] === 'So far, so good'")
        await tab.click(".branches button")  # another tab might have been writing it
        await tab.until(f"{CONTENTS}[1] === 'So far'")


async def test_tabs_at_once_lose_nothing(browser: Chromium, tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await answer(tab, engine, "A1", "Q1")
        other = await browser.tab_beside(tab)
        await other.open(url)
        await other.click(f"{FIRST} .title")
        await other.until(f"{CONTENTS}.length === 2")
        await tab.to_front()
        await answer(tab, engine, "from the first", "Q2")
        await other.to_front()
        await answer(other, engine, "from the second", "Q3")
        assert await other.evaluate(CONTENTS) == ["Q1", "A1", "Q3", "from the second"]
        await tab.to_front()
        await tab.click("#new-chat")
        await answer(tab, engine, "A4", "Q4")
        await other.to_front()
        await other.until(f"{TITLES}.length === 2")  # it hears of it
        await tab.to_front()
        await kept(tab)
        await tab.open(url)
        await tab.click(f"{SECOND} .title")
        await tab.until(f"{CONTENTS}[3] === 'from the second'")
        await tab.click(".turn:nth-child(3) .branches button")
        await tab.until(f"{CONTENTS}[3] === 'from the first'")
        await other.to_front()
        await choose(other, SECOND, "delete")
        await tab.to_front()
        await tab.until(f"{TITLES}.length === 1")
        await answer(tab, engine, "A5", "Q5")  # the open conversation is stored again
        await other.to_front()
        await other.until(f"{TITLES}.length === 2")
        await other.click(f"{FIRST} .title")
        await other.until(f"{CONTENTS}.length === 6")
        await other.send("Page.navigate", url="about:blank")


async def test_what_another_tab_wrote_is_shown_unless_it_is_older(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    write = """new Promise((done) => (indexedDB.open("aengine").onsuccess = ({ target: { result: database } }) => {
        const all = database.transaction(["messages"], "readwrite").objectStore("messages");
        all.getAll().onsuccess = ({ target: { result: [...messages] } }) => {
            const answer = messages.find((one) => one.role === "assistant");
            all.put({ ...answer, content: CONTENT, version: answer.version + STEP }).onsuccess = () => {
                database.close();
                new BroadcastChannel("aengine").postMessage({ id: answer.conversation });
                done(0);
            };
        };
    }))"""
    async with talking_to(engine, tab):
        await answer(tab, engine, "mine", "Q")
        await kept(tab)
        await tab.evaluate(write.replace("CONTENT", "'older'").replace("STEP", "-1"))
        await tab.evaluate("new Promise((done) => setTimeout(done, 200))")
        assert await tab.evaluate(CONTENTS) == ["Q", "mine"]
        await tab.evaluate(write.replace("CONTENT", "'newer'").replace("STEP", "2"))
        await tab.until(f"{CONTENTS}[1] === 'newer'")


@pytest.mark.parametrize("trouble", ["none", "full"])
async def test_without_storage_the_chat_works_and_says_so(tab: Tab, trouble: str) -> None:
    engine = FakeEngine(held=True)
    source = NO_STORAGE if trouble == "none" else FULL_STORAGE
    await tab.send("Page.addScriptToEvaluateOnNewDocument", source=source)
    async with talking_to(engine, tab):
        if trouble == "full":
            await answer(tab, engine, "before", "Q0")
            await tab.evaluate("window.full = true")
        await answer(tab, engine, "A1", "Q1")
        await tab.until("!document.querySelector('#storage-note').hidden")
        expected = "keeps no conversations" if trouble == "none" else "storage is full"
        assert expected in await tab.text("#storage-note")
        await tab.click("#new-chat")
        await answer(tab, engine, "A2", "Q2")
        await tab.until(f"{TITLES}.length === 2")
        await tab.click(f"{SECOND} .title")
        await tab.until(f"{CONTENTS}.includes('A1')")
        await tab.evaluate(SAVED)
        await tab.send("Browser.setDownloadBehavior", behavior="deny", browserContextId=tab.context)
        await choose(tab, FIRST, "export-json")
        await tab.until("window.blob")
        if trouble == "full":
            await tab.evaluate("window.full = false; 0")
            await answer(tab, engine, "A3", "Q3")
            await tab.until("document.querySelector('#storage-note').hidden")
