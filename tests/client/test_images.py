"""Images of a client: bytes, paths and images of Pillow give the answers of an engine, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from aengine import Client, InvalidRequestError
from aengine.client.images import encode_images
from tests.engine.images.seeing import GREEDY, write_model
from tests.http.demo_server import DemoEngine, hosted_demo
from tests.images.files import encoded, png_that_claims, scene, with_orientation
from tests.model.towers.checkpoints import picture

pytestmark = pytest.mark.anyio


def chat(*images: object) -> list[dict[str, Any]]:
    parts: list[dict[str, object]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": "w5 w9"}, *parts, {"type": "text", "text": "w3"}]}]


def turned() -> Image.Image:
    image = scene(60, 30)
    image.getexif()[0x0112] = 6
    return image


@pytest.mark.slow
async def test_answers_and_errors_are_those_of_an_engine(tmp_path: Path) -> None:
    write_model("qwen3-vl", tmp_path)
    (tmp_path / "a.png").write_bytes(encoded(picture(40, 24, 1), "PNG"))
    engine = DemoEngine(model=str(tmp_path), kv_cache_gib=0.02, max_model_len=512, max_num_seqs=8)
    async with hosted_demo(engine) as url, Client(url) as client:
        for images in (
            (encoded(picture(40, 24, 1), "PNG"), bytearray(encoded(picture(30, 30, 3), "JPEG"))),
            (str(tmp_path / "a.png"), tmp_path / "a.png"),
            (picture(40, 24, 1), scene(40, 40).convert("CMYK"), scene(40, 40).convert("RGBA"), scene().convert("P")),
            (turned(), with_orientation(scene(60, 30), "JPEG", 6), scene(60, 30).convert("F"), scene().convert("1")),
        ):
            for messages in (chat(*images), [*chat(*images), {"role": "assistant", "content": "w7"}, *chat(images[0])]):
                one, other = [await model.chat(messages, max_tokens=9, **GREEDY) for model in (engine, client)]
                assert one.token_ids == other.token_ids
                assert one.usage.prompt_tokens == other.usage.prompt_tokens
                chunks = [chunk async for chunk in client.chat_chunks(messages, max_tokens=9, **GREEDY)]
                assert chunks[-1]["usage"]["prompt_tokens"] == one.usage.prompt_tokens
        for bad in (
            b"",
            b"hello",
            7,
            "secret.png",
            encoded(picture(64, 64, 1), "PNG")[:200],
            png_that_claims(60000, 60000),
            Image.new("RGB", (0, 3)),
        ):
            errors = []
            for model in (engine, client):
                with pytest.raises(InvalidRequestError) as caught:
                    await model.chat(chat(bad), max_tokens=2)
                errors.append((str(caught.value), caught.value.param))
            assert errors[0] == errors[1]
        engine.check_integrity()


async def test_the_callers_messages_stay_as_they_are() -> None:
    part = {"type": "image", "image": b"abc"}
    message: dict[str, Any] = {"role": "user", "content": [part, {"type": "text", "text": "hi"}]}
    sent = [dict(message)]
    await encode_images(sent)
    assert sent[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:;base64,YWJj"}},
        {"type": "text", "text": "hi"},
    ]
    assert message["content"][0] is part
    assert part["image"] == b"abc"
