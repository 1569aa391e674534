"""`POST /abort` and `POST /flush_cache`."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx2
import pytest

ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "a", **ENDLESS},
    "/v1/completions": {"prompt": ["a", "b"], **ENDLESS},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], **ENDLESS},
}


def finish_reasons(event: dict[str, Any]) -> list[str]:
    choices = event.get("choices", [event])
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


@pytest.mark.parametrize("path", BODIES)
def test_an_aborted_stream_ends_with_finish_reason_abort(demo: httpx2.Client, path: str) -> None:
    name = f"mine-{path}"
    with demo.stream("POST", path, json=BODIES[path], headers={"X-Request-Id": name}) as response:
        lines = response.iter_lines()
        next(lines)
        assert demo.post("/abort", json={"request_id": name}).json() == {"aborted": 1}
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    reasons = [reason for event in events[:-1] for reason in finish_reasons(json.loads(event))]
    assert set(reasons) == {"abort"}
    assert len(reasons) == (2 if path == "/v1/completions" else 1)
    assert demo.post("/abort", json={"request_id": name}).json() == {"aborted": 0}  # it has ended


def test_by_the_id_in_the_answer(demo: httpx2.Client) -> None:
    with demo.stream("POST", "/v1/completions", json=BODIES["/v1/completions"]) as response:
        lines = response.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert demo.post("/abort", json={"request_id": request_id}).json() == {"aborted": 1}
        assert list(lines)[-2] == "data: [DONE]"


def test_an_unknown_id(demo: httpx2.Client) -> None:
    assert demo.post("/abort", json={"request_id": "nobody"}).json() == {"aborted": 0}
    refused = demo.post("/abort", json={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")


def test_flushing_the_cache(demo: httpx2.Client) -> None:
    body = {"prompt": "one two three four five six seven eight nine ten " * 5, "max_tokens": 1, "stream": False}

    def cached() -> int:
        usage = demo.post("/generate", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert demo.post("/flush_cache").json() == {"flushed": True}
    assert cached() == 0


def test_a_request_in_the_queue(demo_url: str) -> None:
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "n": 32}
    with (
        httpx2.Client(base_url=demo_url, timeout=30, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body | {"stream": True}) as running,
    ):
        lines = running.iter_lines()  # kept, because dropping it would close the connection
        next(lines)  # every row is in use
        answers: list[httpx2.Response] = []
        waiting = threading.Thread(
            target=lambda: answers.append(
                httpx2.post(
                    f"{demo_url}/v1/completions",
                    json={"prompt": "b", "max_tokens": 5},
                    headers={"X-Request-Id": "queued"},
                    timeout=30,
                    trust_env=False,
                )
            )
        )
        waiting.start()
        while client.post("/abort", json={"request_id": "queued"}).json() != {"aborted": 1}:
            pass
        waiting.join()
    (answer,) = answers
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert answer.json()["usage"]["completion_tokens"] == 0


POOLED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": [[300 + n % 9] * 900 for n in range(48)]},
    "/score": {"text_1": "a", "text_2": [f"{n} " * 400 for n in range(48)]},
    "/rerank": {"query": "a", "documents": [f"{n} " * 400 for n in range(48)]},
}


@pytest.mark.parametrize(
    "path", ["/score", *(pytest.param(path, marks=pytest.mark.slow) for path in POOLED if path != "/score")]
)
def test_embeddings_and_scores_are_aborted_too(demo: httpx2.Client, path: str) -> None:
    name, answers = f"pooled-{path}", []

    def ask() -> None:
        answers.append(demo.post(path, json=POOLED[path], headers={"X-Request-Id": name}))

    asking = threading.Thread(target=ask)
    asking.start()
    while not demo.post("/abort", json={"request_id": name}).json()["aborted"]:
        assert asking.is_alive(), answers
    asking.join()
    [answer] = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")
    assert "Retry-After" not in answer.headers  # clients should not retry by themselves
    assert demo.post("/abort", json={"request_id": name}).json() == {"aborted": 0}
