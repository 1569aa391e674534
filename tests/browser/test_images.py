"""Images of messages: attached, pasted, dropped, scaled, sent, shown, stored, and written to files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.text.answer.parser import ChatPrompt
from tests.browser.chromium import Tab
from tests.browser.talking import ENDED, answer, ask, kept, talking_to
from tests.browser.test_conversations import FIRST, SAVED, TITLES, choose
from tests.engine.images.seeing import write_model
from tests.http.fake_engine import Chat, FakeEngine
from tests.http.serving import hosting
from tests.images.files import encoded, scene

pytestmark = pytest.mark.anyio

PNG = encoded(scene(), "PNG")  # 37 x 23
ATTACHED = "document.querySelectorAll('#attached img').length"
# The images of the visible messages that have been decoded.
SHOWN = "[...document.querySelectorAll('.turn .images img')].filter((one) => one.naturalWidth === 37).length"
NOTE = "!document.querySelector('#attach-note').hidden && document.querySelector('#attach-note').textContent"
# Hands files to the page: names and widths; a width of 0 is a file that is no image.
TRANSFER = """(async () => {
    const transfer = new DataTransfer();
    for (const [name, width] of FILES) {
        const canvas = Object.assign(document.createElement("canvas"), { width, height: 10 });
        const drawn = width ? await new Promise((done) => canvas.toBlob(done)) : "text";
        transfer.items.add(new File([drawn], name, { type: "image/png" }));
    }
    const event = EVENT;
    document.querySelector("#question").dispatchEvent(event);
    return event.defaultPrevented;
})()"""
PASTE = 'new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })'
DROP = 'new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true })'
FULL_OF_IMAGES = """(() => {
    const put = IDBObjectStore.prototype.put;
    IDBObjectStore.prototype.put = function (value) {
        if (value.images?.length) {
            const { transaction } = this;
            Object.defineProperty(transaction, "error", { get: () => new DOMException("full", "QuotaExceededError") });
            queueMicrotask(() => transaction.abort());
        }
        return put.call(this, value);
    };
})();"""


class SeeingEngine(FakeEngine):
    """A held engine of a model that takes images. An image is one token."""

    def __init__(self) -> None:
        super().__init__(held=True)
        self.no_images = ""

    async def encode_chat(
        self, messages: list[dict[str, Any]], context: int | None = None, **options: Any
    ) -> ChatPrompt:
        self.chats.append(Chat(messages, **options))
        return ChatPrompt([1] * len(messages), False)

    @property
    def asked(self) -> list[Any]:
        """The contents of the last request."""
        return [message["content"] for message in self.chats[-1].messages]


def with_text(text: str, *images: bytes) -> list[dict[str, Any]]:
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]


@pytest.fixture
def png(tmp_path: Path) -> str:
    (tmp_path / "one.png").write_bytes(PNG)
    return str(tmp_path / "one.png")


async def give(tab: Tab, event: str, *files: tuple[str, int]) -> bool:
    """Paste or drop files. Return whether the page took them."""
    taken: bool = await tab.evaluate(TRANSFER.replace("FILES", json.dumps(files)).replace("EVENT", event))
    return taken


async def attach(tab: Tab, file: str, count: int = 1) -> None:
    await tab.choose_file("#attach-files", file)
    await tab.until(f"{ATTACHED} === {count}")


async def test_an_image_is_sent_shown_and_kept(tab: Tab, png: str) -> None:
    engine = SeeingEngine()
    async with talking_to(engine, tab) as url:
        await tab.until("!document.querySelector('#attach').hidden")
        await attach(tab, png)
        await answer(tab, engine, "A scene.", "What is it?")
        assert engine.asked == [with_text("What is it?", PNG)]
        assert await tab.evaluate(f"{ATTACHED} === 0 && document.querySelector('#attached').hidden")
        await tab.until(f"{SHOWN} === 1")
        await kept(tab)
        await tab.open(url)
        await tab.until(f"{SHOWN} === 1")
        await answer(tab, engine, "Red.", "Which colour?")
        assert engine.asked == [with_text("What is it?", PNG), "A scene.", "Which colour?"]
        await tab.click(".turn:nth-child(2) .again")
        await engine.next_stream()
        assert engine.asked == [with_text("What is it?", PNG)]
        await tab.click("#stop")
        await tab.until(ENDED)
        await tab.click(".turn:nth-child(1) .edit")
        await tab.until("document.querySelector('.editor textarea') === document.activeElement")
        await tab.evaluate("document.activeElement.value = ''")
        await tab.write("Where is it?")
        await tab.click(".editor .primary")
        await engine.next_stream()
        assert engine.asked == [with_text("Where is it?", PNG)]
        assert await tab.evaluate(SHOWN) == 1


async def test_an_image_alone_is_a_message(tab: Tab, png: str) -> None:
    engine = SeeingEngine()
    async with talking_to(engine, tab):
        assert await tab.evaluate("document.querySelector('#send').disabled")
        await attach(tab, png)
        await tab.click("#send")
        await engine.next_stream()
        assert engine.asked == [[{"type": "image", "image": PNG}]]
        assert await tab.evaluate(f"{SHOWN} === 1 && document.querySelector('.asked p').hidden")


async def test_pasted_and_dropped_images_can_be_removed(tab: Tab) -> None:
    engine = SeeingEngine()
    async with talking_to(engine, tab):
        assert await give(tab, PASTE, ("a.png", 20))
        await tab.until(f"{ATTACHED} === 1")
        assert await give(tab, DROP, ("b.png", 30), ("c.txt", 0), ("d.png", 40))
        await tab.until(f"{ATTACHED} === 3")
        assert await tab.until(NOTE) == "c.txt is no image that this browser can read."
        await tab.click("[aria-label='Remove a.png']")
        assert await tab.evaluate(f"{ATTACHED} === 2 && document.activeElement.id === 'question'")
        await ask(tab, "hi")
        await engine.next_stream()
        widths = [Image.open(io.BytesIO(part["image"])).width for part in engine.asked[0][:-1]]
        assert widths == [30, 40]
        assert await tab.evaluate("document.querySelector('#attach-note').hidden")


async def test_large_images_are_scaled_down(tab: Tab, tmp_path: Path) -> None:
    engine = SeeingEngine()
    large = Image.new("RGBA", (5000, 1000), (255, 0, 0, 0))
    large.paste((255, 0, 0, 255), (2500, 0, 5000, 1000))
    large.save(tmp_path / "large.png")
    async with talking_to(engine, tab):
        await attach(tab, str(tmp_path / "large.png"))
        await ask(tab, "hi")
        await engine.next_stream()
        sent = Image.open(io.BytesIO(engine.asked[0][0]["image"]))
    assert (sent.format, sent.size) == ("JPEG", (2048, 410))
    colours = [sent.getpixel((x, 200)) for x in (500, 1500)]
    assert [tuple(round(value / 255) for value in colour) for colour in colours] == [(1, 1, 1), (1, 0, 0)]


async def test_a_model_without_images_gets_none(tab: Tab) -> None:
    async with talking_to(FakeEngine(), tab):
        assert await tab.evaluate("document.querySelector('#attach').hidden")
        assert await give(tab, DROP, ("a.png", 20))
        assert await tab.until(NOTE) == "The model takes no images."
        assert await tab.evaluate(ATTACHED) == 0


async def test_a_full_storage_keeps_the_text(tab: Tab, png: str) -> None:
    engine = SeeingEngine()
    await tab.send("Page.addScriptToEvaluateOnNewDocument", source=FULL_OF_IMAGES)
    async with talking_to(engine, tab) as url:
        await attach(tab, png)
        await answer(tab, engine, "A scene.", "What is it?")
        await tab.until("document.querySelector('#storage-note').textContent.includes('kept without their images')")
        await tab.until(f"{TITLES}.length === 1")
        await tab.click("#new-chat")
        await tab.click(f"{FIRST} .title")
        await tab.until(f"{SHOWN} === 1")
        await kept(tab)
        await tab.open(url)
        assert await tab.text(".asked") == "What is it?"
        assert await tab.text(".prose") == "A scene."
        assert await tab.evaluate(SHOWN) == 0


@pytest.mark.parametrize("kind", ["json", "markdown"])
async def test_files_have_the_images(tab: Tab, tmp_path: Path, png: str, kind: str) -> None:
    engine = SeeingEngine()
    async with talking_to(engine, tab):
        await attach(tab, png)
        await answer(tab, engine, "A scene.", "What\n\nis it?")
        await tab.send("Browser.setDownloadBehavior", behavior="deny", browserContextId=tab.context)
        await tab.evaluate(SAVED)
        await choose(tab, FIRST, f"export-{kind}")
        await tab.until("window.blob")
        file = tmp_path / ("talk.json" if kind == "json" else "talk.md")
        file.write_text(await tab.evaluate("window.blob.text()"))
        await choose(tab, FIRST, "delete")
        await tab.until(f"{TITLES}.length === 0")
        await tab.choose_file("#import-file", str(file))
        await tab.until(f"{SHOWN} === 1")
        await ask(tab, "And?")
        await engine.next_stream()
        assert engine.asked == [with_text("What\n\nis it?", PNG), "A scene.", "And?"]


async def test_images_of_other_files_are_checked(tab: Tab, tmp_path: Path) -> None:
    engine = SeeingEngine()
    bad = ["data:image/svg+xml;base64,PHN2Zz4=", "data:image/png;base64,?", "https://example.org/a.png", 5, None]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in bad]
    content = [{"type": "text", "text": "hi"}, *parts, None]
    (tmp_path / "a.json").write_text(json.dumps([{"messages": [{"role": "user", "content": content, "images": bad}]}]))
    async with talking_to(engine, tab):
        await tab.choose_file("#import-file", str(tmp_path / "a.json"))
        assert await tab.text(".asked") == "hi"
        assert await tab.evaluate("document.querySelectorAll('#turns img').length") == 0


@pytest.mark.parametrize("width", [320, 1200])
async def test_images_fit_and_have_names(tab: Tab, width: int, png: str) -> None:
    engine = SeeingEngine()
    await tab.look(width, 700)
    async with talking_to(engine, tab):
        assert await give(tab, PASTE, *((f"{i}.png", 2000) for i in range(3)))
        await tab.until(f"{ATTACHED} === 3")
        await answer(tab, engine, "Fine.", "w" * 400)
        assert await give(tab, PASTE, *((f"{i}.png", 30) for i in range(9)))
        await tab.until(f"{ATTACHED} === 9")
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        assert await tab.evaluate("document.querySelector('#log').scrollWidth") <= width
        for selector in ("#attach", "#question", "#send", "#attached li:nth-child(9) button"):
            box = await tab.evaluate(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
            assert box["left"] >= 0
            assert box["right"] <= width
            assert box["bottom"] <= 700
        tree = (await tab.send("Accessibility.getFullAXTree"))["nodes"]
        named = [(one["role"]["value"], one["name"]["value"]) for one in tree if not one["ignored"] and "name" in one]
        assert {("button", "Attach images"), ("button", "Remove 0.png"), ("image", "0.png")} <= set(named)


async def test_a_model_that_sees_answers_about_an_image(tab: Tab, tmp_path: Path, png: str) -> None:
    write_model("qwen3-vl", tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", max_num_seqs=8, kv_cache_gib=0.02, max_model_len=512, progress=False
    )
    async with (
        hosting(create_app(config, ServerConfig())) as (port, _),
        tab.visiting(f"http://127.0.0.1:{port}"),
    ):
        await tab.until("!document.querySelector('#attach').hidden")
        await attach(tab, png)
        await tab.evaluate("document.querySelector('[name=max_tokens]').value = '8'")
        await ask(tab, "w5 w9")
        await tab.until(ENDED)
        assert "8 tokens" in await tab.text(".turn:last-child .foot")
