"""Images that are refused, with errors that name the part, and models that take none."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import aengine
from aengine.engine.interpreter import SWITCH_SECONDS
from aengine.engine.requests import image_reading
from aengine.errors import ContextLengthError, InvalidRequestError
from aengine.images.header import Header, read_header
from tests.engine.images.seeing import CHATS, GREEDY, Seeing, answer, make_seeing, message, write_model
from tests.images.files import encoded, png_that_claims, with_orientation
from tests.model.towers.checkpoints import picture

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make_seeing("mistral3", tmp_path_factory.mktemp("mistral3"))


def part(source: object) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "w5"}, {"type": "image", "image": source}]
    return [{"role": "system", "content": "w1"}, {"role": "user", "content": content}]


BAD: dict[str, tuple[object, str]] = {
    "no image": (b"hello", "is no PNG, JPEG, WebP or GIF"),
    "empty": (b"", "is empty"),
    "number": (7, "is a int; give bytes, a path or an image of Pillow"),
    "text": ("secret.png", "is the path of no file"),
    "null": ("secret\0.png", "is the path of no file"),
    "folder": ("/", "is the path of no file"),
    "damaged": (encoded(picture(9, 9), "PNG")[:120], "is a damaged or incomplete PNG"),
    "bomb": (png_that_claims(60000, 60000), "has 60000 x 60000 pixels, more than"),
}


async def test_errors_name_the_part_and_no_path(seeing: Seeing) -> None:
    async with seeing.engine() as engine:
        for source, text in BAD.values():
            with pytest.raises(InvalidRequestError) as caught:
                await engine.chat(part(source))
            assert str(caught.value).startswith(f"messages[1].content[1]: {text}")
            assert "secret" not in str(caught.value)
            assert caught.value.param == "messages"
        assert engine.stats().requests == 0


async def test_images_are_bounded_before_they_are_decoded(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_reading, "decode_image", None)  # is not called
    small = {"type": "image", "image": png_that_claims(90, 90)}
    large = {"type": "image", "image": png_that_claims(8000, 8000)}
    async with seeing.engine() as engine:
        for parts, text in (
            ([small] * 257, "messages: have 257 images, at most 256"),
            ([large] * 5, r"messages\[0\].content\[4\]: the images up to this one have 320000000 pixels"),
        ):
            with pytest.raises(InvalidRequestError, match=text):
                await engine.encode_chat([{"role": "user", "content": parts}])
        with pytest.raises(ContextLengthError, match=r"512 tokens\. However, at least 576 tokens are given"):
            await engine.chat([{"role": "user", "content": [small] * 20}])


async def test_paths_and_images_of_pillow_are_like_bytes(seeing: Seeing, tmp_path: Path) -> None:
    file = tmp_path / "picture.jpg"
    file.write_bytes(with_orientation(picture(40, 24), "JPEG", 6))
    async with seeing.engine() as engine:
        sources = [file, str(file), file.read_bytes(), bytearray(file.read_bytes()), Image.open(file)]
        prompts = [(await engine.encode_chat(part(source))).images for source in sources]
        assert prompts[0] is not None
        assert prompts[0].images[0].rows > prompts[0].images[0].columns  # rotated
        assert prompts == [prompts[0]] * len(prompts)


async def test_a_placeholder_in_text_is_text(seeing: Seeing) -> None:
    async with seeing.engine() as engine:
        image = picture(24, 24, 5)
        for text in ("[IMG]", "[IMG_END]"):
            prompt = await engine.encode_chat(message([text, image, text]))
            assert prompt.token_ids.count(120) == 9
            assert prompt.images is not None
            assert len(prompt.images.images) == 1
            alone = await engine.encode_chat(message([text]))
            assert alone.images is None
            assert not {118, 119, 120} & set(alone.token_ids)


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "other.jinja"
    path.write_text("{% for one in messages %}w1{% endfor %}")
    return str(path)


async def test_a_template_that_leaves_images_out(seeing: Seeing, template: str) -> None:
    chat = message(CHATS[1])
    async with seeing.engine(chat_template=template) as engine:
        with pytest.raises(InvalidRequestError, match="have 1 images, but the chat template wrote 0"):
            await engine.chat(chat)


async def test_images_of_another_prompt_are_refused(seeing: Seeing) -> None:
    async with seeing.engine() as engine:
        prompt = await engine.encode_chat(message(CHATS[0]))
        with pytest.raises(InvalidRequestError, match="do not belong to these token ids"):
            await engine.submit(prompt.token_ids[:20], images=prompt.images)


async def test_text_alone(seeing: Seeing, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    text, expected = CHATS[-1], seeing.expected[-1]
    async with seeing.engine(images="off") as engine:
        assert engine.no_images == "the knob images is off"
        assert engine._ready().runtime.model.tower is None
        assert (await engine.chat(message(text), max_tokens=20, **GREEDY)).token_ids == expected
        with pytest.raises(InvalidRequestError, match="takes no images: the knob images is off; send text alone"):
            await engine.chat(message(CHATS[0]))
        prompt = await engine.encode_chat(message(text))
        assert prompt.images is None
    assert "images: off, because the knob images is off" in caplog.text


async def test_a_checkpoint_without_the_weights_of_its_tower_serves_text(tmp_path: Path) -> None:
    model = write_model("qwen3-vl", tmp_path)
    weights = tmp_path / "model.safetensors"
    kept = {name: one for name, one in load_file(weights).items() if "visual" not in name}
    save_file(kept, weights, {"format": "pt"})
    async with aengine.Engine(str(tmp_path), device="cpu", kv_cache_gib=0.01, progress=False) as engine:
        assert "visual" in engine.no_images
        chat = CHATS[-1]
        prompt = await engine.encode_chat(message(chat))
        completion = await engine.chat(message(chat), max_tokens=20, **GREEDY)
        assert completion.token_ids == answer("qwen3-vl", model, prompt.token_ids, chat)


async def test_a_tokenizer_without_a_token_of_images(seeing: Seeing, tmp_path: Path) -> None:
    for file in seeing.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("[IMG_BREAK]", "[OTHER]"))
    assert json.loads(path.read_text())
    async with aengine.Engine(str(tmp_path), device="cpu", kv_cache_gib=0.01, progress=False) as engine:
        assert "the tokenizer has no token [IMG_BREAK]" in engine.no_images


async def test_threads_switch_quickly_while_images_are_read(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def watch(data: bytes, most: int) -> Header:
        seen.append(sys.getswitchinterval())
        return read_header(data, most)

    monkeypatch.setattr(image_reading, "read_header", watch)
    usual = sys.getswitchinterval()
    async with seeing.engine() as engine:
        await engine.encode_chat(part(encoded(picture(40, 24, 1), "PNG")))
        with pytest.raises(InvalidRequestError):
            await engine.encode_chat(part(b"hello"))
        assert sys.getswitchinterval() == usual
    assert seen == [pytest.approx(SWITCH_SECONDS)] * 2
