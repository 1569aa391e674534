"""Images on the command line: `--image`, `/image`, and images in files of prompts and in saved chats."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image, ImageDraw

import aengine
from aengine.cli.chat.shell import Shell
from aengine.cli.errors import CommandError, UsageError
from aengine.cli.generate.prompts import answer_line
from aengine.cli.images import check_takes_images, read_image
from aengine.errors import InvalidRequestError
from tests.cli.chat.test_shell import FakeModel, typing
from tests.cli.generate.test_prompts import Model
from tests.cli.running import run, served
from tests.engine.checkpoints import text_alone
from tests.images.files import encoded, png_that_claims, scene

PNG = encoded(scene(), "PNG")
NO_KNOBS = {"AENGINE_DEVICE": "", "AENGINE_KV_CACHE_GIB": ""}
PART = {"type": "image", "image": PNG}


def asked(text: str, *images: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


@pytest.fixture
def png(tmp_path: Path) -> str:
    (tmp_path / "one.png").write_bytes(PNG)
    return str(tmp_path / "one.png")


# ---- files ------------------------------------------------------------------------------------------------


def test_a_file_becomes_a_part(png: str) -> None:
    assert read_image(png, "--image") == PART


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (None, "there is no file '{}'; check the path"),
        (b"text", "'{}' is no PNG, JPEG, WebP or GIF; convert it to one of these"),
        (PNG[:9], "'{}' is damaged or incomplete"),
        (png_that_claims(100_000, 100_000), "'{}' has 100000 x 100000 pixels, more than"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes | None, told: str) -> None:
    file = tmp_path / "one.png"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_image(str(file), "--image")
    assert str(caught.value).startswith(f"--image: {told.format(file)}")


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_files_are_checked_before_a_model_is_loaded(command: str, png: str, tmp_path: Path) -> None:
    args = (command, "--model", "/nonexistent/model", "--image", png)
    done = run(*args, "--image", str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"aengine: --image: there is no file '{tmp_path}'; check the path\n")
    done = run(*args, "--images", "off")
    assert done.returncode == 2
    assert done.stderr.startswith("aengine: --image: the knob images is off")


# ---- the shell --------------------------------------------------------------------------------------------


async def shell_of(model: FakeModel, *lines: str, **options: Any) -> tuple[str, Shell]:
    out = io.StringIO()
    shell = Shell(model, out, {}, dim=False, **options)
    await shell.run(typing(*lines))
    return out.getvalue(), shell


@pytest.mark.anyio
async def test_images_go_with_the_next_message() -> None:
    model = FakeModel()
    await shell_of(model, "one", "two", images=[PART])
    assert [one["content"] for one in model.asked[1][0]] == [asked("one", PART)["content"], "Hello.", "two"]


@pytest.mark.anyio
async def test_the_command_adds_and_removes(png: str) -> None:
    model = FakeModel()
    said, _ = await shell_of(
        model, f"/image {png}", "/image", f"/image {png}", f"/image {png}", "one", "/image none.png"
    )
    assert model.asked[0][0] == [asked("one", PART, PART)]
    assert "[1 image goes with the next message]\n[no images go with" in said
    assert "[/image: there is no file 'none.png'; check the path]" in said


@pytest.mark.anyio
async def test_images_without_an_answer_go_with_the_next_message() -> None:
    model = FakeModel(InvalidRequestError("too dark", "messages"))
    said, _ = await shell_of(model, "one", "two", images=[PART])
    assert model.asked[1][0] == [asked("two", PART)]
    assert "[too dark]\n[1 image goes with the next message; /image removes them]" in said


@pytest.mark.anyio
async def test_the_shell_refuses_images_for_a_model_that_takes_none(png: str) -> None:
    said, _ = await shell_of(FakeModel(), f"/image {png}", no_images="it reads text only")
    assert said.startswith("[the model takes no images: it reads text only]")


@pytest.mark.anyio
async def test_a_saved_chat_has_its_images(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    await shell_of(FakeModel(), "one", f"/save {file}", images=[PART])
    url = json.loads(file.read_text())["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    _, loaded = await shell_of(FakeModel(), f"/load {file}")
    assert loaded.messages == [asked("one", PART), {"role": "assistant", "content": "Hello."}]
    other = {"messages": [{"role": "user", "content": ["text", {"type": "image", "image": "one.png"}]}]}
    file.write_text(json.dumps(other))
    _, loaded = await shell_of(FakeModel(), f"/load {file}", f"/save {file}")
    assert json.loads(file.read_text())["messages"] == loaded.messages == other["messages"]
    for data in ("?", "dGV4dA=="):
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        file.write_text(json.dumps({"messages": [{"role": "user", "content": [part]}]}))
        said, loaded = await shell_of(FakeModel(), f"/load {file}")
        assert said.startswith("[an image of the conversation cannot be read: ")
        assert loaded.messages == []


# ---- files of prompts -------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("plain", [True, False])
async def test_prompts_become_chats_with_the_images(plain: bool) -> None:
    model = Model()
    line = b"hi" if plain else b'{"prompt": "hi", "max_tokens": 3}'
    await answer_line(model, {"top_k": 5}, 1, line, plain=plain, ids=False, images=[PART, PART])
    own = {} if plain else {"max_tokens": 3}
    assert model.asked == [{"prompt": "chat", "messages": [asked("hi", PART, PART)], "top_k": 5, **own}]


@pytest.mark.anyio
@pytest.mark.parametrize("line", [b"[1, 2]", b'{"messages": []}'])
async def test_other_lines_are_refused_with_the_flag(line: bytes) -> None:
    result = await answer_line(Model(), {}, 1, line, plain=False, ids=False, images=[PART])
    assert result.body["error"]["message"].startswith("with --image, the line must be a prompt that is text")


# ---- models -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_without_images_is_not_loaded(tmp_path: Path, png: str) -> None:
    folder = str(text_alone(tmp_path / "text"))
    for command in ("chat", "generate"):
        done = run(command, "--model", folder, "--image", png, given="hi\n")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("aengine: --image: the model takes no images: it reads text only; leave it out")


def test_a_loaded_model_without_images_refuses_the_flag() -> None:
    model = FakeModel()
    check_takes_images(model, [PART])  # like a server
    model.no_images = "the knob images is off"  # type: ignore[attr-defined]
    check_takes_images(model, [])
    with pytest.raises(CommandError, match="--image: the model takes no images: the knob images is off"):
        check_takes_images(model, [PART])


@pytest.mark.slow
@pytest.mark.anyio
async def test_answers_are_those_of_the_engine(tmp_path: Path, png: str) -> None:
    from tests.engine.images.seeing import CHATS, GREEDY, message, write_model

    folder = tmp_path / "model"
    write_model("qwen3-vl", folder)
    chat = message(CHATS[1])
    image, text = chat[0]["content"]
    (tmp_path / "two.png").write_bytes(image["image"])
    knobs = {"model": str(folder), "device": "cpu", "kv_cache_gib": 0.02, "max_model_len": 512, "progress": False}
    async with aengine.Engine(**knobs) as engine:
        expected = [
            (await engine.chat(one, max_tokens=8, **GREEDY)).text for one in (chat, [asked(text["text"], PART)])
        ]
    sampling = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos", "true")
    own = ("--model", str(folder), "--max-model-len", "512")
    line = msgspec.json.encode(
        {"messages": [asked(text["text"], {"type": "image", "image": str(tmp_path / "two.png")})]}
    )
    with served(*own) as server:
        done = run("generate", *own, *sampling, given=line)
        assert json.loads(done.stdout)["text"] == expected[0]
        done = run("generate", "--url", server.url, *sampling, given=line, **NO_KNOBS)
        assert json.loads(done.stdout)["text"] == expected[0]
        done = run("generate", *own, *sampling, "--text", "--image", png, given=text["text"])
        assert json.loads(done.stdout)["text"] == expected[1] != expected[0]
        flags = ("--url", server.url, *sampling, "--image", str(tmp_path / "two.png"))
        done = run("chat", *flags, given=f"{text['text']}\n", **NO_KNOBS)
        assert done.stdout.startswith(expected[0])


@pytest.mark.slow
def test_the_demo_model_says_what_a_picture_shows(tmp_path: Path) -> None:
    path = str(tmp_path / "circle.png")
    image = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(image).ellipse((50, 50, 150, 150), "red")
    image.save(path)
    question = "What is in this picture?\n"
    assert json.loads(run("generate", "--text", "--image", path, given=question).stdout)["text"] == "A red circle."
    assert run("chat", "--image", path, given=question).stdout.startswith("A red circle.")
