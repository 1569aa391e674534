"""Images through a real server and a small random model: the answers are those of `Engine.chat`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from PIL import Image

from tests.engine.images.seeing import GREEDY, message, write_model
from tests.http.demo_server import DemoEngine, hosted_demo
from tests.http.fetching.hosts import answer, hosting_files
from tests.images.files import encoded, png_that_claims
from tests.model.towers.checkpoints import picture

pytestmark = pytest.mark.anyio

PARTS = ["w5 w9", picture(40, 24, 1), "w8 w2", picture(30, 30, 3), "w4"]
SHORT = {"max_tokens": 12, **GREEDY}
KEPT = {"kept_responses": 9}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-vl")
    write_model("qwen3-vl", folder)
    return folder


@asynccontextmanager
async def served(checkpoint: Path, **knobs: Any) -> AsyncIterator[tuple[DemoEngine, str]]:
    engine = DemoEngine(model=str(checkpoint), kv_cache_gib=0.02, max_model_len=512, max_num_seqs=8)
    async with hosted_demo(engine, **knobs) as url:
        assert engine.no_images == ""
        yield engine, url


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat_parts(*parts: Any) -> list[Any]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(encoded(part, "PNG"))}}
        for part in parts
    ]


def response_parts(*parts: Any) -> list[Any]:
    return [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "detail": "auto", "image_url": url(encoded(part, "PNG"))}
        for part in parts
    ]


def blocks(*parts: Any) -> list[Any]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": base64.b64encode(encoded(part, "PNG")).decode(),
            },
        }
        for part in parts
    ]


@pytest.mark.slow
async def test_the_clients_of_openai_and_anthropic(checkpoint: Path) -> None:
    async with served(checkpoint, **KEPT) as (engine, address):
        expected = await engine.chat(message(PARTS), **SHORT)
        tokens = expected.usage.prompt_tokens
        assert tokens > 12

        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            chat = await client.chat.completions.create(
                model=engine.model_name,
                messages=[{"role": "user", "content": chat_parts(*PARTS)}],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert chat.choices[0].message.content == expected.text
            assert chat.choices[0].token_ids == list(expected.token_ids)  # type: ignore[attr-defined]
            assert chat.usage is not None
            assert chat.usage.prompt_tokens == tokens
            asked: dict[str, Any] = {
                "model": engine.model_name,
                "max_output_tokens": 12,
                "temperature": 0,
                "extra_body": {"ignore_eos": True},
            }
            items: Any = [{"role": "user", "content": response_parts(*PARTS)}]
            response = await client.responses.create(input=items, **asked)
            assert response.output_text == expected.text
            assert response.usage is not None
            assert response.usage.input_tokens == tokens
            assert (
                await client.responses.input_tokens.count(model=engine.model_name, input=items)
            ).input_tokens == tokens
            # The next turn of a kept response sees its images.
            more = await client.responses.create(previous_response_id=response.id, input="w7", **asked)
            turns = [
                *message(PARTS),
                {"role": "assistant", "content": expected.text},
                {"role": "user", "content": "w7"},
            ]
            assert more.output_text == (await engine.chat(turns, **SHORT)).text
            listed = await client.responses.input_items.list(response.id)
            assert [part.type for part in listed.data[0].content] == [part["type"] for part in items[0]["content"]]  # type: ignore[union-attr]

        async with anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client:
            turn: Any = [{"role": "user", "content": blocks(*PARTS)}]
            reply = await client.messages.create(
                model=engine.model_name,
                max_tokens=12,
                messages=turn,
                extra_body={"temperature": 0},
            )
            assert reply.content[0].type == "text"
            ends = await engine.chat(message(PARTS), max_tokens=12, temperature=0)
            assert reply.content[0].text == ends.text
            counted = await client.messages.count_tokens(model=engine.model_name, messages=turn)
            assert counted.input_tokens == tokens

        async with httpx2.AsyncClient(base_url=address) as http:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": chat_parts(*PARTS)}]}
            assert len((await http.post("/tokenize", json=body)).json()["tokens"]) == tokens
            generated = (await http.post("/generate", json={**body, **SHORT, "stream": False})).json()
            assert generated["token_ids"] == list(expected.token_ids)
            assert generated["usage"]["prompt_tokens"] == tokens
        engine.check_integrity()


@pytest.mark.slow
async def test_images_by_url_are_those_in_base64(checkpoint: Path) -> None:
    data = encoded(picture(40, 24, 1), "PNG")
    async with hosting_files(answer(data)) as host:
        far = f"http://127.0.0.1:{host.port}/a.png"
        parts: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
            (
                "/v1/chat/completions",
                "messages",
                {"type": "image_url", "image_url": {"url": url(data)}},
                {"type": "image_url", "image_url": {"url": far}},
            ),
            (
                "/v1/responses",
                "input",
                {"type": "input_image", "image_url": url(data)},
                {"type": "input_image", "image_url": far},
            ),
            (
                "/v1/messages",
                "messages",
                blocks(picture(40, 24, 1))[0],
                {"type": "image", "source": {"type": "url", "url": far}},
            ),
        ]
        async with (
            served(checkpoint, image_url_hosts=(f"127.0.0.1:{host.port}",)) as (engine, address),
            httpx2.AsyncClient(base_url=address, timeout=60) as http,
        ):
            for path, name, near, linked in parts:
                answers = []
                for part in (near, linked):
                    engine.flush_cache()
                    body = {name: [{"role": "user", "content": [part]}], "max_tokens": 8, "temperature": 0}
                    body |= {"max_output_tokens": body.pop("max_tokens")} if path == "/v1/responses" else {}
                    response = await http.post(path, json={"model": engine.model_name, **body})
                    assert response.status_code == 200, response.text
                    answers.append(response.json())
                key = {"/v1/responses": "output", "/v1/messages": "content"}.get(path, "choices")
                without_ids = [re.sub(r'"(msg|id)[^"]*": "[^"]*"', "", json.dumps(one[key])) for one in answers]
                assert without_ids[0] == without_ids[1]
                assert answers[0]["usage"] == answers[1]["usage"]
            assert len(host.requests) == len(parts)
            engine.check_integrity()


def animation() -> bytes:
    file = BytesIO()
    frames = [picture(20, 20, seed) for seed in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


GOOD = {
    "an animation": animation(),
    "CMYK": encoded(picture(20, 20, 1).convert("CMYK"), "JPEG"),
    "one pixel": encoded(Image.new("RGB", (1, 1)), "PNG"),
}
BAD = {
    "text": (b"hello", "is no PNG, JPEG, WebP or GIF"),
    "truncated": (encoded(picture(64, 64, 1), "PNG")[:200], "is a damaged or incomplete PNG"),
    "without a size": (encoded(picture(64, 64, 1), "PNG")[:20], "is damaged or incomplete"),
    "a bomb": (png_that_claims(60000, 60000), "has 60000 x 60000 pixels, more than"),
    "a lie": (png_that_claims(3000, 3000), "is a damaged or incomplete PNG"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG, JPEG, WebP or GIF"),
}


@pytest.mark.slow
async def test_hostile_images_get_errors_that_name_the_part(checkpoint: Path) -> None:
    def body(*images: bytes) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url(data)}} for data in images]
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}, *parts]}], "max_tokens": 2}

    async with served(checkpoint) as (engine, address), httpx2.AsyncClient(base_url=address, timeout=60) as http:
        for name, data in GOOD.items():
            answer = await http.post("/v1/chat/completions", json=body(data))
            assert answer.status_code == 200, (name, answer.text)
        for name, (data, text) in BAD.items():
            answer = await http.post("/v1/chat/completions", json=body(encoded(picture(9, 9, 1), "PNG"), data))
            error = answer.json()["error"]
            assert answer.status_code == 400, (name, error)
            assert error["param"] == "messages[0].content[2].image_url.url"
            assert error["message"].startswith(f"{error['param']}: {text}"), name
            assert "0x" not in error["message"]
        many = await http.post("/v1/chat/completions", json=body(*[encoded(picture(9, 9, 1), "PNG")] * 100))
        assert many.status_code in (200, 400)
        more = await http.post("/v1/chat/completions", json=body(*[b"x"] * 300))
        assert "have 300 images, at most 256" in more.json()["error"]["message"]
        long = await http.post("/v1/chat/completions", json=body(*[encoded(picture(64, 64, 1), "PNG")] * 250))
        assert long.json()["error"]["code"] == "context_length_exceeded"
        engine.check_integrity()


@pytest.mark.slow
@pytest.mark.alone
async def test_the_server_stays_responsive_beside_hostile_images(checkpoint: Path) -> None:
    bodies = [
        os.urandom(15_000_000),
        b"\xff\xd8\xff" + b"\xff\x00" * 7_500_000,  # a JPEG of markers that are none
        encoded(picture(64, 64, 1), "PNG")[:60] + os.urandom(15_000_000),
        png_that_claims(8000, 8000),
        encoded(picture(2000, 2000, 1), "PNG"),
    ]
    encoded_bodies = [
        httpx2.Request(
            "POST",
            "http://a/",
            json={
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(data)}}]}],
                "max_tokens": 1,
            },
        ).content
        for data in bodies
    ]
    async with served(checkpoint) as (_, address):
        waits: list[float] = []
        statuses: list[int] = []
        async with httpx2.AsyncClient(base_url=address, timeout=300) as http:

            async def send(data: bytes) -> None:
                answer = await http.post(
                    "/v1/chat/completions", content=data, headers={"Content-Type": "application/json"}
                )
                statuses.append(answer.status_code)

            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(send(data)) for _ in range(20) for data in encoded_bodies]
                while not all(task.done() for task in running):
                    begun = time.monotonic()
                    assert (await http.get("/health")).status_code == 200
                    waits.append(time.monotonic() - begun)
                    await asyncio.sleep(0.02)
    waits.sort()
    assert set(statuses) <= {200, 400}
    assert waits[len(waits) // 2] < 0.05, waits[-10:]
