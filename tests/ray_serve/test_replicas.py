"""Two engines on a real Ray: the API of one server, and requests when one engine is lost."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator

import anthropic
import httpx2
import pytest
from openai.types.responses import Response

from tests.ray_serve.cluster import Cluster, cluster, until

pytest.importorskip("ray")
pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with cluster("replicas=2", "max_model_len=2048", "sleep_mode=true", "kept_responses=100") as running:
        yield running


def chat(*turns: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
    return {"messages": messages, "max_tokens": 16, **fields}


def test_the_api_is_that_of_one_server(two: Cluster) -> None:
    with httpx2.Client(base_url=two.url, timeout=30) as client:
        assert client.get("/ready").json() == {"ready": True, "model": "aengine-demo"}
        assert client.get("/v1/models").json()["data"][0]["id"] == "aengine-demo"
        assert client.get("/").text.startswith("<!doctype html>")
        answer = client.post("/v1/chat/completions", json=chat("Hello!"), headers={"x-request-id": "mine"})
        assert answer.json()["choices"][0]["message"]["content"]
        assert answer.headers["x-request-id"] == "mine"
        refused = client.post("/v1/chat/completions", json=chat("Hello!", temperature=-1))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        assert client.post("/v1/chat/completions", content=b"{").status_code == 400
        assert client.post("/generate", content=b"a", headers={"content-type": "text/csv"}).status_code == 415
        assert client.get("/nowhere").json()["error"]["code"] == "not_found"
        assert client.post("/flush_cache").json() == {"flushed": True}


def test_all_of_them_sleep_and_wake(two: Cluster) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "stream": False}
    with httpx2.Client(base_url=two.url, timeout=60) as client:
        before = client.post("/generate", json=body).json()["text"]
        assert client.post("/sleep").json() == {"is_sleeping": True}
        for _ in range(6):  # on either replica
            assert client.post("/generate", json=body).status_code == 503
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.post("/wake_up").json() == {"is_sleeping": False}
        for _ in range(6):
            assert client.post("/generate", json=body).json()["text"] == before


def test_a_stream_has_the_text_of_the_whole_answer(two: Cluster) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = httpx2.post(f"{two.url}/generate", json={**body, "stream": False}, timeout=30).json()
    with httpx2.stream("POST", f"{two.url}/generate", json=body, timeout=30) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["text"] for event in events[:-1]) == whole["text"]


async def test_responses_are_gone_on_with_where_they_are_kept(two: Cluster) -> None:
    async with httpx2.AsyncClient(base_url=f"{two.url}/v1", timeout=60) as client:

        async def make(number: int) -> str:
            body = {
                "input": f"{number} {number}",
                "max_output_tokens": 64,
                "ignore_eos": True,
                "stream": number % 2 == 1,
            }
            (name,) = set(re.findall(r'"id":"(resp_\w+)"', (await client.post("/responses", json=body)).text))
            return name

        for name in await asyncio.gather(*map(make, range(8))):  # at once, so that both replicas get some
            more = {"input": "And then?", "previous_response_id": name, "max_output_tokens": 4}
            assert (await client.post("/responses", json=more)).status_code == 200
            assert (await client.get(f"/responses/{name}")).json()["id"] == name
            assert (await client.get(f"/responses/{name}/input_items")).status_code == 200
            assert (await client.delete(f"/responses/{name}")).status_code == 200
            assert (await client.get(f"/responses/{name}")).status_code == 404


def test_metrics_are_each_replicas_own(two: Cluster) -> None:
    assert two.metric("aengine_ready") == dict.fromkeys(two.metric("aengine_ready"), 1.0)
    assert len(two.metric("aengine_ready")) == 2
    assert len(two.metric("vllm:kv_cache_usage_perc")) == 2


def test_turns_of_a_chat_are_found_where_the_last_one_was(two: Cluster) -> None:
    found = []
    with httpx2.Client(base_url=two.url, timeout=60) as client:
        for number in range(8):
            question = f"Chat {number}: tell me a story about the number {number * 37} and its {number} friends."
            turns = [question]
            for turn in range(3):
                body = client.post("/v1/chat/completions", json=chat(*turns, ignore_eos=True)).json()
                if turn:
                    found.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
                turns += [body["choices"][0]["message"]["content"], f"And then, for the {turn}th time?"]
    assert min(found) > 0, found  # with random routing, half of them would find nothing


def test_a_client_that_leaves_aborts_its_request_within_a_second(two: Cluster) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}
    took = []
    for _ in range(3):  # the best of them: the machine may be busy
        with httpx2.stream("POST", f"{two.url}/generate", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert sum(two.metric("aengine_requests_running").values()) == 1
        took.append(until(lambda: sum(two.metric("aengine_requests_running").values()) == 0, 30))
    assert min(took) < 1


def test_a_request_is_aborted_by_its_id_wherever_it_runs(two: Cluster) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}
    headers = {"x-request-id": "to-be-aborted"}
    with httpx2.stream("POST", f"{two.url}/generate", json=body, headers=headers, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        aborted = httpx2.post(f"{two.url}/abort", json={"request_id": "to-be-aborted"}, timeout=30).json()
        assert aborted == {"aborted": 1}
        assert any('"finish_reason":"abort"' in line for line in lines)


async def stream(client: httpx2.AsyncClient, number: int, tokens: int) -> tuple[str, float]:
    """Return how a stream ended (`done`, or its error's code), and when (monotonic seconds)."""
    body = {"prompt": f"{number} times {number} is", "max_tokens": tokens, "ignore_eos": True}
    *_, last = await events(client, "/generate", body)
    end = "done" if last == "[DONE]" else json.loads(last)["error"]["code"]
    return end, time.monotonic()


async def response(client: httpx2.AsyncClient, number: int, tokens: int) -> tuple[str, float]:
    """Like `stream`, for a response. Its events must fit OpenAI's types and be numbered without gaps."""
    body = {"input": f"{number} times {number} is", "max_output_tokens": tokens, "ignore_eos": True, "stream": True}
    told = [json.loads(event) for event in await events(client, "/v1/responses", body)]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    Response.model_validate(told[-1]["response"], strict=True)
    if told[-1]["type"] == "response.failed":
        return told[-2]["code"], time.monotonic()
    assert told[-1]["type"] == "response.incomplete"
    return "done", time.monotonic()


async def message(client: anthropic.AsyncAnthropic, number: int, tokens: int) -> tuple[str, float]:
    """Like `stream`, with Anthropic's client. A schema makes the answer as long as possible."""
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": tokens}
    schema = {"type": "object", "properties": {"a": numbers}, "required": ["a"], "additionalProperties": False}
    try:
        async with client.messages.stream(
            model="aengine-demo",
            max_tokens=tokens,
            messages=[{"role": "user", "content": f"{number} times {number} is"}],
            output_config={"format": {"type": "json_schema", "schema": schema}},
        ) as answer:
            async for _ in answer:
                pass
            assert (await answer.get_final_message()).stop_reason == "max_tokens"
    except anthropic.APIStatusError as error:
        return "engine_failed" if error.type == "api_error" else str(error), time.monotonic()
    return "done", time.monotonic()


async def events(client: httpx2.AsyncClient, path: str, body: dict[str, object]) -> list[str]:
    """Return the data of a stream's events, up to a cut."""
    async with client.stream("POST", path, json=body) as answer:
        return [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]


async def test_streams_go_on_when_others_that_began_before_them_leave(two: Cluster) -> None:
    limits = httpx2.Limits(max_connections=100)
    async with httpx2.AsyncClient(base_url=two.url, timeout=120, limits=limits) as client:
        leaving = [asyncio.create_task(stream(client, number, 1500)) for number in range(8)]
        await asyncio.to_thread(until, lambda: sum(two.metric("aengine_requests_running").values()) == 8, 30)
        staying = [asyncio.create_task(stream(client, number, 800)) for number in range(8, 16)]
        await asyncio.to_thread(until, lambda: sum(two.metric("aengine_requests_running").values()) == 16, 30)
        for one in leaving:
            one.cancel()
        await asyncio.wait(leaving)
        async with asyncio.timeout(120):
            assert {end for end, _ in await asyncio.gather(*staying)} == {"done"}


async def test_a_replica_that_dies_loses_its_own_streams_alone(two: Cluster) -> None:
    before = set(two.metric("aengine_ready"))
    async with (
        httpx2.AsyncClient(base_url=two.url, timeout=120, limits=httpx2.Limits(max_connections=100)) as client,
        anthropic.AsyncAnthropic(base_url=two.url, api_key="none", max_retries=0) as claude,
    ):
        streams = [asyncio.create_task(stream(client, number, 800)) for number in range(30)]
        streams += [asyncio.create_task(response(client, number, 800)) for number in range(30, 40)]
        streams += [asyncio.create_task(message(claude, number, 800)) for number in range(40, 50)]
        await asyncio.to_thread(until, lambda: sum(two.metric("aengine_requests_running").values()) == 50, 30)
        running = two.metric("aengine_requests_running")
        assert min(running.values()) > 5
        two.kill_one()
        killed = time.monotonic()
        new = await stream(client, 50, 3)
        ends = await asyncio.gather(*streams)
    lost = [when - killed for end, when in ends if end != "done"]
    assert {end for end, _ in ends} == {"done", "engine_failed"}
    assert len(lost) in running.values()
    assert max(lost) < 5
    assert new[0] == "done"
    until(lambda: len(set(two.metric("aengine_ready")) - before) == 1, 60)  # its replacement


async def test_a_replica_that_is_removed_finishes_its_streams(two: Cluster) -> None:
    until(lambda: len(two.metric("aengine_ready")) == 2, 60)
    async with httpx2.AsyncClient(base_url=two.url, timeout=120, limits=httpx2.Limits(max_connections=100)) as client:
        streams = [asyncio.create_task(stream(client, number, 800)) for number in range(20)]
        await asyncio.to_thread(until, lambda: min(two.metric("aengine_requests_running").values()) > 3, 30)
        await asyncio.to_thread(two.deploy, "replicas=1", "max_model_len=2048")
        assert [end for end, _ in await asyncio.gather(*streams)] == ["done"] * 20
        assert (await stream(client, 1, 3))[0] == "done"
    until(lambda: len(two.engines()) == 1, 30)


def test_without_a_replica_it_answers_not_ready(two: Cluster) -> None:
    until(lambda: len(two.engines()) == 1, 30)
    two.kill_one()
    with httpx2.Client(base_url=two.url, timeout=60) as client:
        answer = client.get("/ready")
        if answer.status_code != 200:  # a request may also wait until the other replica is ready
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        until(lambda: client.get("/ready").status_code == 200, 60)
