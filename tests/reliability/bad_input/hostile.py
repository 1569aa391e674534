"""A live server that gets only bad requests, and the rules that each of its refusals must follow."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from aengine.model.loading.hub import resolve_model
from tests.http.demo_server import DemoEngine, hosted_demo

API_KEY = "the-key-of-this-server-and-no-word-of-an-error"
CANARY = "TESTS_CANARY", "a-secret-of-the-environment-3f9c1e"
# What betrays the machine or the program: nothing of it belongs into an answer.
GIVEAWAYS = ("Traceback", 'File "', "site-packages", ".py", " at 0x", "/root", "/home/", "/tmp/", "/usr/", "/var/")


def secrets_of_the_machine(checkpoint: Path | None = None) -> set[str]:
    """The key, the folders that this process knows, and the longer values of its environment."""
    folders = {Path.home(), Path.cwd(), Path(sys.prefix), Path(__file__).parents[3], resolve_model(None, None)}
    values = {value for value in os.environ.values() if len(value) >= 12}
    return {API_KEY, CANARY[1]} | values | {str(folder) for folder in folders | ({checkpoint} if checkpoint else set())}


class Hostile:
    """A client that looks at every refusal: its form, its size, and that it keeps the machine's secrets.

    Statuses of 500 and above fail at once, but for an honest 503.
    """

    def __init__(self, url: str, engine: DemoEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._loop = loop
        self._secrets = secrets_of_the_machine(None if engine.config.model is None else Path(engine.config.model))
        headers = {"Authorization": f"Bearer {API_KEY}"}
        # No connection idles until the server closes it (after 5 seconds), perhaps just as it is used.
        limits = httpx2.Limits(keepalive_expiry=2)
        self.client = httpx2.Client(base_url=url, timeout=60, trust_env=False, headers=headers, limits=limits)
        self.refusals = 0

    def post(self, path: str, body: bytes | str | dict[str, Any], **headers: str) -> httpx2.Response:
        data = json.dumps(body) if isinstance(body, dict) else body
        return self.judged(self.client.post(path, content=data, headers=headers), data)

    def judged(self, response: httpx2.Response, sent: bytes | str = b"") -> httpx2.Response:
        asked = sent if isinstance(sent, bytes) else sent.encode()
        case = f"{response.request.url.path} {asked[:200]!r}: {response.status_code} {response.text[:500]}"
        assert response.status_code < 500 or response.status_code == 503, case
        if response.status_code >= 400:
            self.refusals += 1
            assert response.headers["content-type"] == "application/json", case
            self._judge(response.json(), response.text, asked, case)
        elif response.headers["content-type"].startswith("text/event-stream"):
            for line in response.text.splitlines():
                if line.startswith('data: {"error"'):
                    self._judge(json.loads(line[6:]), line, asked, case)
        return response

    def refused(
        self,
        path: str,
        body: bytes | str | dict[str, Any],
        param: str | tuple[str, ...] | None,
        words: str,
        status: int = 400,
    ) -> dict[str, Any]:
        """Send a body. The refusal must have this status and param (or one of several), and name it in the message.

        words: a pattern that the message must also match.
        """
        response = self.post(path, body)
        sent = body if isinstance(body, (bytes, str)) else json.dumps(body)
        case = f"{path} {sent[:200]!r}: {response.status_code} {response.text[:500]}"
        assert response.status_code == status, case
        error: dict[str, Any] = response.json()["error"]
        assert error["param"] in (param if isinstance(param, tuple) else (param,)), case
        assert re.search(words, error["message"]), f"{words!r} not in {case}"
        assert error["param"] is None or named_in(error["param"], error["message"]), case
        return error

    def _judge(self, body: Any, text: str, asked: bytes, case: str) -> None:
        assert set(body) == {"error"}, case
        assert set(body["error"]) == {"message", "type", "param", "code"}, case
        assert body["error"]["type"] in ("invalid_request_error", "server_error"), case
        assert isinstance(body["error"]["message"], str), case
        assert body["error"]["message"], case
        assert len(text) < 20_000, case
        assert body["error"]["code"] not in ("internal_error", "engine_failed"), case
        told = [word for word in (*GIVEAWAYS, *self._secrets) if word in text and word.encode() not in asked]
        assert not told, f"{told} in {case}"

    def run(self, work: Any) -> Any:
        """Call `work` on the loop of the server."""

        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(30)

    def settled(self, seconds: float = 10.0) -> None:
        """The engine comes to rest, every page and row is accounted for, and it still knows its capital."""
        deadline = time.monotonic() + seconds
        while (stats := self.run(self.engine.stats)).running or stats.waiting:
            assert time.monotonic() < deadline, f"{stats.running} running, {stats.waiting} waiting"
            self.client.get("/health")
        self.run(self.engine.check_integrity)
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        health = self.client.get("/health")
        assert health.status_code == 200, health.text
        asked = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0, "stream": False}
        assert self.post("/generate", asked).json()["text"] == " Paris."


def named_in(param: str, message: str) -> bool:
    """A message names a nested field by its path, or by one of the names on it."""
    return any(name in message for name in (param, *re.findall(r"\w+", param)))


@contextmanager
def hostile_demo(**knobs: Any) -> Iterator[Hostile]:
    """A small demo server in a thread of its own. Leaving it checks that nothing was lost."""
    ready: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    engine = DemoEngine(**({"max_model_len": 256} | knobs))

    async def serve() -> None:
        try:
            async with hosted_demo(engine, api_keys=(API_KEY,)) as url:
                ready.set_result(url)
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        hostile = Hostile(ready.result(60), engine, loop)
        with hostile.client:
            yield hostile
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
