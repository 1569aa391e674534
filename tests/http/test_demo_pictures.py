"""The demo model answers about pictures, over every API and with the clients of their makers."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from PIL import Image, ImageDraw

from tests.http.demo_server import DemoEngine, hosted_demo

pytestmark = pytest.mark.anyio

WHAT = "What is in this picture?"


def drawn(kind: str) -> Image.Image:
    image = Image.new("RGB", (220, 200), "white")
    pen = ImageDraw.Draw(image)
    if kind == "circle":
        pen.ellipse((60, 50, 160, 150), "red")
    else:
        pen.rectangle((70, 50, 160, 140), "blue")
    return image


def png(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


CIRCLE, SQUARE = png(drawn("circle")), png(drawn("square"))
ANSWERS = {CIRCLE: "A red circle.", SQUARE: "A blue square."}


def chat(picture: str, question: str) -> list[Any]:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    return [{"role": "user", "content": [{"type": "text", "text": question}, part]}]


async def test_the_python_api() -> None:
    async with DemoEngine() as engine:
        for kind, question, wanted in (
            ("circle", WHAT, "A red circle."),
            ("circle", "What colour is the circle?", "A red circle."),
            ("square", WHAT, "A blue square."),
            ("square", "How many squares are there?", "A blue square."),
        ):
            content = [{"type": "image", "image": drawn(kind)}, {"type": "text", "text": question}]
            answer = await engine.chat([{"role": "user", "content": content}], max_tokens=30)
            assert answer.text == wanted
        engine.check_integrity()


async def test_every_api_over_http() -> None:
    async with hosted_demo() as address, httpx2.AsyncClient(base_url=address, timeout=60) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["takes_images"]
        for picture, answer in ANSWERS.items():
            body = {"messages": chat(picture, WHAT)}
            done = (await http.post("/v1/chat/completions", json=body)).json()
            assert done["choices"][0]["message"]["content"] == answer
            streamed = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
            lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if json.loads(line)["choices"]]
            assert "".join(delta.get("content") or "" for delta in deltas) == answer
            generated = (await http.post("/generate", json={**body, "stream": False})).json()
            assert generated["text"] == answer
            assert (await http.post("/tokenize", json=body)).json()["count"] == done["usage"]["prompt_tokens"]
            more = [*body["messages"], {"role": "assistant", "content": answer}]
            again = {"role": "user", "content": "What is this?"}
            turn = (await http.post("/v1/chat/completions", json={"messages": [*more, again]})).json()
            assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] > 32  # the picture is not computed again


async def test_the_clients_of_openai_and_anthropic() -> None:
    async with hosted_demo() as address:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            for picture, wanted in ANSWERS.items():
                done = await client.chat.completions.create(model="aengine-demo", messages=chat(picture, WHAT))
                assert done.choices[0].message.content == wanted
                part: Any = {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{picture}"}
                items: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": WHAT}]}]
                assert (await client.responses.create(model="aengine-demo", input=items)).output_text == wanted
        async with anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as other:
            for picture, wanted in ANSWERS.items():
                source: Any = {"type": "base64", "media_type": "image/png", "data": picture}
                blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": WHAT}]
                message = await other.messages.create(
                    model="aengine-demo", max_tokens=30, messages=[{"role": "user", "content": blocks}]
                )
                assert message.content[0].type == "text"
                assert message.content[0].text == wanted
