"""The server as its users start it: `hypercorn aengine.app:app`, with the model that comes with the package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.free_port import free_port
from tests.http.serving import parse_events, streaming_command

FRANCE = {"prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
START_SECONDS = 120


class Hypercorn:
    """A server process on a port of its own, which it keeps over restarts."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        # Nor do idle connections stay, which the server closes after some seconds, perhaps just as one is used.
        limits = httpx2.Limits(max_keepalive_connections=0)
        url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.Client(base_url=url, limits=limits, timeout=30, trust_env=False)
        self.log = log
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("w") as out:
            return subprocess.Popen(
                [Path(sys.executable).with_name("hypercorn"), "--bind", f"127.0.0.1:{self.port}", "aengine.app:app"],
                env={name: value for name, value in os.environ.items() if not name.startswith("AENGINE_")},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def restart(self) -> None:
        self.process = self._start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Poll like a start script until 200. At first the port is closed, then the answer is 503."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx2.ConnectError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"the server did not become ready:\n{self.log.read_text()}")

    def metrics(self) -> dict[str, float]:
        lines = self.client.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}

    def idle_within(self, seconds: float) -> bool:
        """Whether nothing runs, waits or holds pages before the time is up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = self.metrics()
            held = now["aengine_requests_running"] + now["aengine_requests_waiting"] + now["aengine_kv_pages_used"]
            if held == 0:
                assert now["aengine_kv_pages_free"] + now["aengine_kv_pages_cached"] == now["aengine_kv_pages"]
                return True
        return False

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hypercorn]:
    running = Hypercorn(tmp_path_factory.mktemp("server") / "log")
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.client.close()
        if running.process.poll() is None:
            running.stop()


def curl(server: Hypercorn, body: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(streaming_command(server.port, "/generate", body), stdout=subprocess.PIPE)


def text_of(stream: bytes) -> str:
    *events, done = parse_events(stream.decode())
    assert done == "[DONE]"
    assert events[-1]["usage"]["completion_tokens"] == sum(len(event["token_ids"]) for event in events)
    return "".join(event["text"] for event in events)


def test_a_stream_of_real_text(server: Hypercorn) -> None:
    out, _ = curl(server, FRANCE).communicate(timeout=30)
    assert text_of(out).startswith(" Paris")


def test_the_answer_in_one_piece_is_the_same(server: Hypercorn) -> None:
    whole = server.client.post("/generate", json=FRANCE | {"stream": False}).json()
    streamed, _ = curl(server, FRANCE).communicate(timeout=30)
    assert whole["text"] == text_of(streamed)


def test_two_streams_at_once(server: Hypercorn) -> None:
    clients = [curl(server, FRANCE), curl(server, FRANCE | {"prompt": "The capital of Italy is"})]
    france, italy = (text_of(client.communicate(timeout=30)[0]) for client in clients)
    assert france.startswith(" Paris")
    assert italy.startswith(" Rome")


def test_the_pool_is_idle_soon_after_a_kill(server: Hypercorn) -> None:
    client = curl(server, LONG)
    assert client.stdout is not None
    assert client.stdout.readline().startswith(b"data: ")
    assert server.metrics()["aengine_requests_running"] == 1
    client.kill()
    assert server.idle_within(20)
    assert server.metrics()["aengine_generated_tokens_total"] < LONG["max_tokens"]
    client.communicate(timeout=10)


def test_a_prompt_that_does_not_fit(server: Hypercorn) -> None:
    context = server.client.get("/v1/models").json()["data"][0]["max_model_len"]
    response = server.client.post("/generate", json=FRANCE | {"max_tokens": context})
    assert response.status_code == 400
    assert str(context) in response.json()["error"]["message"]


def test_bad_values_name_their_field(server: Hypercorn) -> None:
    for field, value in {"temperature": -1, "input_ids": [10**9], "stop": [""], "n": 0}.items():
        body = {field: value} if field == "input_ids" else FRANCE | {field: value}
        response = server.client.post("/generate", json=body)
        assert response.status_code == 400, response.text
        assert field in json.dumps(response.json()["error"])


def test_a_chat_through_the_official_client(server: Hypercorn) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        question = [{"role": "user", "content": "What is the capital of France?"}]
        chat = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=30)  # type: ignore[call-overload]
        assert "Paris" in chat.choices[0].message.content


@pytest.mark.slow
def test_it_stops_with_exit_status_0_and_starts_again(server: Hypercorn) -> None:
    before = server.client.post("/generate", json=FRANCE | {"stream": False}).json()["text"]
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()
    server.restart()
    assert server.client.post("/generate", json=FRANCE | {"stream": False}).json()["text"] == before
