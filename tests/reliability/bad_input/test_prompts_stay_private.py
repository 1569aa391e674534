"""Prompts stay private: a server writes nothing of them to its log, whether a request succeeds or fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from tests.cli.running import Served, environment

SECRETS = ("Mrs. Aurelia Quimby", "owes the milkman", "forty-two zlotys", "under the doormat")
PROMPT = ", ".join(SECRETS)
DEADLY = 4000  # a token whose step fails
SECRET_IDS = [311, 1027, 499, 2213, 777, 1511]  # a prompt in the form of ids


@contextmanager
def process(*args: str) -> Iterator[Served]:
    """`aengine serve` in a process of its own whose steps with the deadly token fail."""
    command = [sys.executable, "-m", "tests.reliability.bad_input.failing_server", "serve", "--port", "0", *args]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment(TESTS_DEADLY_TOKEN=str(DEADLY)),
        text=True,
    )
    try:
        served = Served(running)
        with served.client:
            yield served
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate(timeout=30)


def send_all(client: httpx2.Client) -> dict[str, int]:
    """Send the prompt in every form and with every outcome. Returns statuses by request."""
    chat = {
        "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT, "name": SECRETS[0]}]
    }
    told = {"max_tokens": 3, "temperature": 0}
    tool = {"type": "function", "function": {"name": "f", "description": PROMPT, "parameters": {"type": PROMPT}}}
    deadly = [*SECRET_IDS, DEADLY]
    tried: dict[str, httpx2.Response] = {
        "a stream": client.post("/generate", json={"prompt": PROMPT, **told}),
        "a whole answer": client.post("/v1/completions", json={"prompt": PROMPT, "echo": True, "logprobs": 1, **told}),
        "a chat": client.post("/v1/chat/completions", json={**chat, **told, "user": PROMPT, "cache_salt": PROMPT}),
        "ids": client.post("/generate", json={"input_ids": SECRET_IDS, **told}),
        "tokenize": client.post("/tokenize", json={"prompt": PROMPT}),
        "structured": client.post("/generate", json={"prompt": "a", "guided_choice": [PROMPT], **told}),
        "a value out of range": client.post("/generate", json={"prompt": PROMPT, "temperature": 9}),
        "a wrong type": client.post("/generate", json={"prompt": [PROMPT]}),
        "broken JSON": client.post("/generate", content=json.dumps({"prompt": PROMPT})[:-1]),
        "broken text": client.post("/generate", content=json.dumps({"prompt": PROMPT + "\ud800"})),
        "an unknown model": client.post("/v1/completions", json={"prompt": "a", "model": PROMPT}),
        "too long": client.post("/generate", json={"prompt": PROMPT * 500}),
        "a bad regex": client.post("/generate", json={"prompt": PROMPT, "guided_regex": f"({PROMPT}"}),
        "a bad tool": client.post("/v1/chat/completions", json={**chat, "tools": [tool]}),
        "a bad template argument": client.post(
            "/v1/chat/completions", json={**chat, "chat_template_kwargs": {"tools": PROMPT}}
        ),
        "a wrong content type": client.post("/generate", content=PROMPT, headers={"Content-Type": "text/plain"}),
        "a wrong door": client.post("/nowhere", json=chat),
        "a failing step": client.post("/generate", json={"input_ids": deadly, "stream": False, **told}),
        "a failing step, streamed": client.post("/generate", json={"input_ids": deadly, **told}),
    }
    with client.stream("POST", "/generate", json={"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}) as left:
        next(left.iter_lines())  # and away
    # In the same step as the deadly token, so that their step fails too.
    body = {"prompt": [SECRET_IDS, deadly], "max_tokens": 3}
    tried["beside a failing step"] = client.post("/v1/completions", json=body)
    for what, response in tried.items():
        if response.status_code >= 500:
            assert response.json()["error"]["code"] == "engine_failed", what
            assert "Traceback" not in response.text
            assert str(SECRET_IDS[0]) not in response.text
    return {what: response.status_code for what, response in tried.items()}


@pytest.mark.slow
@pytest.mark.parametrize("args", [(), ("--access-log",)], ids=["plain", "access-log"])
def test_nothing_of_a_prompt_is_written(args: tuple[str, ...]) -> None:
    with process(*args) as server:
        statuses = send_all(server.client)
        assert server.client.get("/health").status_code == 200
        server.send(signal.SIGTERM)
        status, rest = server.end()
    written = "".join(server.told) + rest
    assert status == 0
    assert statuses["a failing step"] == statuses["beside a failing step"] == 500
    assert [what for what, code in statuses.items() if code == 200] == [
        "a stream",
        "a whole answer",
        "a chat",
        "ids",
        "tokenize",
        "structured",
        "a failing step, streamed",
    ]
    assert written.count("an injected step error") >= 3, "this would have seen it"
    assert ("POST /generate" in written) == bool(args)
    found = [word for secret in SECRETS for word in (secret, *secret.split()) if len(word) > 5 and word in written]
    found += [
        text for text in (", ".join(map(str, SECRET_IDS[:3])), " ".join(map(str, SECRET_IDS[:3]))) if text in written
    ]
    assert not found, f"{found} in:\n{written}"
