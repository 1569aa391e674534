"""Parts of messages that are images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import aengine
from aengine.engine.requests.image_parts import ImagePart, take_images
from aengine.errors import InvalidRequestError
from tests.engine.checkpoints import text_alone

pytestmark = pytest.mark.anyio


def test_images_are_taken_out_and_the_callers_content_stays() -> None:
    text = {"type": "text", "text": "hello"}
    content: list[object] = [text, {"type": "image", "image": b"one"}, {"type": "image", "image": "two.png"}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "short"}, {"role": "user", "content": content}]
    parts = take_images(messages)
    assert parts == [ImagePart("messages[1].content[1]", b"one"), ImagePart("messages[1].content[2]", "two.png")]
    assert messages[1]["content"] == [text, {"type": "image"}, {"type": "image"}]
    assert content[1] == {"type": "image", "image": b"one"}


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}], "a b"),
        (({"type": "text", "text": "a"},), "a"),
        ([], ""),
        ([{"type": "text", "text": None}], [{"type": "text", "text": None}]),
        ([{"type": "text", "text": "a"}, "b"], [{"type": "text", "text": "a"}, "b"]),
    ],
)
def test_parts_of_text_alone_become_a_text(content: object, joined: object) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    assert take_images(messages) == []
    assert messages[0]["content"] == joined


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": "data:,"}}])
def test_other_forms_are_refused(part: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape("messages[0].content[0]: an image must be given as")):
        take_images([{"role": "user", "content": [part]}])


def test_parts_that_no_model_reads_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"content\[1\]: models read text and images, not"):
        take_images([{"role": "user", "content": ["text", {"type": "video", "video": b""}]}])


async def test_a_model_without_a_tower_refuses_images(tmp_path: Path) -> None:
    part = {"type": "image", "image": str(tmp_path / "secret.png")}
    folder = str(text_alone(tmp_path / "text"))
    async with aengine.Engine(folder, device="cpu", kv_cache_gib=0.05, progress=False) as engine:
        assert engine.no_images
        with pytest.raises(
            InvalidRequestError, match=r"messages.0..content.0.: the model takes no images: it"
        ) as caught:
            await engine.chat([{"role": "user", "content": [part]}])
    assert caught.value.param == "messages"
    assert "secret" not in str(caught.value)
