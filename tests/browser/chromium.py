"""A headless Chromium, driven over two pipes in its DevTools protocol: JSON messages that end with a zero byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

SECONDS = 60.0  # for any one thing to happen
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = [
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root and containers cannot have it; nothing is opened but our own page
    "--no-first-run",
    "--no-proxy-server",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # it is small in containers
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--font-render-hinting=none",
    "--mute-audio",
]

Listener = Callable[[str, dict[str, Any]], None]


def find_chromium() -> str | None:
    """The program, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Chromium:
    """A running browser. Commands may be sent to it or to one of its tabs, whose events go to their listener."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listeners: dict[str, Listener] = {}

    async def listen(self) -> None:
        """Read until the browser ends. Pending calls then fail."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if (answer := self._answers.pop(message.get("id", 0), None)) is not None:
                    if not answer.done():
                        answer.set_result(message)
                elif (listener := self._listeners.get(message.get("sessionId", ""))) is not None:
                    listener(message["method"], message["params"])
        for answer in self._answers.values():
            answer.set_exception(ConnectionResetError("the browser has ended"))

    async def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        message_id = next(self._ids)
        message = {"id": message_id, "method": method, "params": params} | ({"sessionId": session} if session else {})
        answer = self._answers[message_id] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(SECONDS):
            reply = await answer
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        result: dict[str, Any] = reply["result"]
        return result

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A tab with storage of its own, as after a fresh start."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        try:
            yield await self._open_tab(context)
        finally:
            await self.send("Target.disposeBrowserContext", browserContextId=context)

    async def tab_beside(self, other: Tab) -> Tab:
        """Another tab, with the same storage; it is closed with the other one."""
        return await self._open_tab(other.context)

    async def _open_tab(self, context: str) -> Tab:
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"], context)
        self._listeners[attached["sessionId"]] = tab.hear
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.send(f"{domain}.enable")
        await tab.look(1200, 800)
        return tab


class Tab:
    """One page: actions of a reader, and the page's messages and requests."""

    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self._browser, self._session, self.context = browser, session, context
        self.complaints: list[str] = []  # console errors, exceptions, violations of the policy, failed requests
        self.requested: list[str] = []  # addresses

    def hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.send(method, self._session, **params)

    async def allow(self, permission: str, url: str) -> None:
        """Grant a permission to the pages of this origin, as a reader would."""
        params = {"origin": url, "permissions": [permission], "browserContextId": self.context}
        await self._browser.send("Browser.grantPermissions", **params)

    async def to_front(self) -> None:
        """Look at this one of several tabs: one that is hidden draws nothing and takes no input."""
        await self.send("Page.bringToFront")

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.protocol !== 'about:'")

    @asynccontextmanager
    async def visiting(self, url: str) -> AsyncIterator[None]:
        """Open a page, and close it while its server still answers."""
        await self.open(url)
        yield
        await self.send("Page.navigate", url="about:blank")

    async def evaluate(self, expression: str) -> Any:
        """The value, awaited if it is a promise."""
        reply = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in reply:
            raise AssertionError(f"{expression}: {reply['exceptionDetails']['exception'].get('description')}")
        return reply["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The first true value. The page looks itself, so that a change is seen within 20 ms."""
        limit = SECONDS * 1000 - 2000
        looked = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {limit};
            const look = () => {{
                const value = ({expression});
                if (value) resolve(value);
                else if (performance.now() > end) reject(new Error("it did not happen"));
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        return await self.evaluate(looked)

    async def text(self, selector: str) -> str:
        """Return the text of the first matching element, once there is one."""
        shown: str = (
            await self.until(
                f"document.querySelector({selector!r}) && [document.querySelector({selector!r}).textContent]"
            )
        )[0]
        return shown

    async def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element that matches."""
        x, y = await self.until(f"""(() => {{
            const element = document.querySelector({selector!r});
            element?.scrollIntoViewIfNeeded();
            const box = element?.getBoundingClientRect();
            return box && box.width > 1 && [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def choose_file(self, selector: str, path: str) -> None:
        """Give a field for files one of this machine's."""
        root = (await self.send("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.send("DOM.querySelector", nodeId=root, selector=selector))["nodeId"]
        await self.send("DOM.setFileInputFiles", files=[path], nodeId=node)

    async def write(self, text: str) -> None:
        """Type into the focused element."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def look(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """The size of the window, in CSS pixels, and the colours that its reader prefers."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[colours])

    async def picture(self) -> bytes:
        """PNG."""
        return b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def chromium(program: str) -> AsyncIterator[Chromium]:
    """Start it, end it. It reads commands from its file descriptor 3 and writes answers to 4."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command_out, command_in = os.pipe()
        answer_out, answer_in = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", f'exec "$0" "$@" 3</dev/fd/{command_out} 4>/dev/fd/{answer_in}'),
            *(program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"),
            pass_fds=(command_out, answer_in),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"HOME": folder},
        )
        os.close(command_out)
        os.close(answer_in)
        reader = asyncio.StreamReader(limit=2**26)
        reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answer_out))
        writing, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(command_in, "w")
        )
        browser = Chromium(reader, asyncio.StreamWriter(writing, protocol, None, loop))
        listening = asyncio.create_task(browser.listen())
        try:
            yield browser
        finally:
            with suppress(ConnectionError, TimeoutError):
                await browser.send("Browser.close")
            writing.close()
            try:
                async with asyncio.timeout(SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
            reading.close()
