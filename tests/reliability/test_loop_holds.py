"""No request can hold the event loop, and so all other requests, for long."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from aengine.model.loading.hub import resolve_model

pytestmark = pytest.mark.alone

CPU_LIMIT = 0.1  # seconds of the loop's own work in one go; 0.05 is what holds in quiet, a busy core is slower
WALL_LIMIT = 0.4  # seconds that others may wait, including other processes and threads that hold the GIL
TRIES = 6  # the best counts: whatever else the machine does is not the server's fault

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LOOPING = "{% if messages[0]['content'] == 'loop' %}" + LOOPS + "{% endif %}"
SENTENCE = "The quick brown fox jumps over the lazy dog, said number 4711. "
MEGABYTE = (SENTENCE * (2**20 // len(SENTENCE) + 1))[: 2**20]
IDS = [number % 4000 for number in range(500_000)]
WIDE = {
    "type": "object",
    "properties": {
        f"field_{at}": {"type": ["string", "null"], "enum": [f"v{at}-{j}" for j in range(20)]} for at in range(400)
    },
}
PARAMETERS = {
    "type": "object",
    "properties": {f"p{at}": {"type": "string", "description": "x" * 50} for at in range(8)},
}
TOOLS = [{"type": "function", "function": {"name": f"f{at}", "parameters": PARAMETERS}} for at in range(128)]
GRAMMAR = "start: a0\n" + "".join(f'a{at}: "x" a{at + 1} | "y" a{at + 1}\n' for at in range(3000)) + 'a3000: "z"\n'
LONG: dict[str, Any] = {"ignore_eos": True, "temperature": 1}


def chat(text: str, **others: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **others}


CASES: dict[str, tuple[str, dict[str, Any] | bytes | None, int]] = {  # path, body, status
    "a prompt of 1 MB": (GENERATE, {"prompt": MEGABYTE}, 400),
    "a prompt of 1 MB, cut": (GENERATE, {"prompt": MEGABYTE, "truncate_prompt_tokens": 9, "max_tokens": 1}, 200),
    "a message of 1 MB": (CHAT, chat(MEGABYTE), 400),
    "a message of control tokens": (CHAT, chat("<|im_start|>" * 87_000), 400),
    "half a million ids": (GENERATE, {"input_ids": IDS}, 400),
    "half a million ids to complete": (COMPLETIONS, {"prompt": IDS}, 400),
    "1,024 prompts, the last of them bad": (COMPLETIONS, {"prompt": ["One two three " * 120] * 1023 + [""]}, 400),
    "1,024 lists of 450 ids, the last of them bad": (COMPLETIONS, {"prompt": [IDS[:450]] * 1023 + [[]]}, 400),
    "a prompt of 32 MB": (GENERATE, b'{"prompt":"' + b"a" * (2**25 - 20) + b'"}', 400),
    "32 MB of ids": (GENERATE, b'{"input_ids":[' + b"1," * (2**24 - 20) + b"1]}", 413),
    "32 MB of objects": (CHAT, b'{"messages":[' + b"{}," * 11_000_000 + b"{}]}", 413),
    "25,000 messages": (CHAT, {"messages": [{"role": "user", "content": "hi"}] * 25_000}, 400),
    "a template that loops": (CHAT, chat("loop"), 400),
    "a wide schema": (GENERATE, {"prompt": "a", "max_tokens": 30, "structured_outputs": {"json": WIDE}}, 200),
    "a monstrous grammar": (
        GENERATE,
        {"prompt": "a", "max_tokens": 9, "structured_outputs": {"grammar": GRAMMAR}},
        200,
    ),
    "a long regex": (GENERATE, {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "a?" * 60_000}}, 400),
    "128 tools": (CHAT, chat("hi", tools=TOOLS), 400),
    "20 logprobs of 500 tokens": (CHAT, chat("hi", logprobs=True, top_logprobs=20) | LONG | {"max_tokens": 500}, 200),
    "20 logprobs of 32 x 20 tokens": (
        CHAT,
        chat("hi", logprobs=True, top_logprobs=20, n=32) | LONG | {"max_tokens": 20},
        200,
    ),
    "the same streamed": (
        CHAT,
        chat("hi", logprobs=True, top_logprobs=20, n=32, stream=True) | LONG | {"max_tokens": 20},
        200,
    ),
    "20 logprobs of a long prompt": (
        GENERATE,
        {"input_ids": IDS[:1800], "max_tokens": 1, "prompt_logprobs": 20},
        200,
    ),
    "an echo with 20 logprobs": (
        COMPLETIONS,
        {"prompt": IDS[:1800], "max_tokens": 1, "echo": True, "logprobs": 20},
        200,
    ),
    "n of 128": (COMPLETIONS, {"prompt": IDS[:900], "n": 128, "max_tokens": 3, **LONG}, 200),
    "bad words, biases and stops": (
        GENERATE,
        {
            "prompt": "a",
            "max_tokens": 9,
            "bad_words": [f"word {at} of many" for at in range(256)],
            "logit_bias": {str(at): 1.5 for at in range(1024)},
            "stop_token_ids": IDS[:1024],
        },
        200,
    ),
    "half a million shown ids": (GENERATE, {"prompt": "a", "shown_special_ids": IDS}, 400),
    "tokenizing 1 MB": ("/tokenize", {"prompt": MEGABYTE, "return_token_strs": True}, 200),
    "detokenizing half a million ids": ("/detokenize", {"tokens": IDS}, 200),
    "metrics": ("/metrics", None, 200),
    "the schema": ("/openapi.json", None, 200),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template that loops forever on request."""
    folder, demo = tmp_path_factory.mktemp("checkpoint"), resolve_model(None, None)
    for file in demo.iterdir():
        (folder / file.name).symlink_to(file)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps(settings | {"chat_template": LOOPING + settings["chat_template"]}))
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[httpx2.Client]:
    command = [sys.executable, "-m", "tests.reliability.watched_server", str(checkpoint)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{int(process.stdout.readline())}", timeout=120, trust_env=False
        ) as client:
            yield client
        process.stdin.close()


@pytest.mark.parametrize("case", CASES)
def test_the_loop_is_not_held(server: httpx2.Client, case: str) -> None:
    path, body, status = CASES[case]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    holds: list[tuple[float, float]] = []
    while len(holds) < TRIES and not any(good(*hold) for hold in holds):
        server.get("/worst")
        answer = server.get(path) if body is None else server.post(path, content=content)
        assert answer.status_code == status, answer.text[:500]
        worst = server.get("/worst").json()
        holds.append((worst["cpu"], worst["wall"]))
    told = ", ".join(f"{cpu * 1000:.0f} ms of work and {wall * 1000:.0f} ms in all" for cpu, wall in holds)
    print(f"\n{case}: {told}")
    assert any(good(*hold) for hold in holds), told


def good(cpu: float, wall: float) -> bool:
    return cpu < CPU_LIMIT and wall < WALL_LIMIT
