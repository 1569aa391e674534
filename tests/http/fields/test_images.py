"""Images in the messages of every API, with an engine that takes images and decodes none."""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from aengine.errors import InvalidRequestError
from aengine.http.fields import image_sources
from aengine.http.fields.image_sources import EncodedImage
from aengine.http.fields.images import content_of
from aengine.prompt_images import PlacedImage, PromptImages
from aengine.text.answer.parser import ChatPrompt
from tests.http.fake_engine import Chat, FakeEngine
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NAMES = {CHAT: "messages", "/generate": "messages", MESSAGES: "messages", RESPONSES: "input"}
FIELDS = {
    CHAT: "image_url.url",
    "/generate": "image_url.url",
    MESSAGES: "source.data",
    RESPONSES: "image_url",
}
PADDED = "A" * (2**18 - 1) + "=AAAA"  # padding at the end of a slice
LONG = bytes(range(200, 256)) * 20_000  # several slices of base64


def image(path: str, data: str) -> dict[str, Any]:
    """Return a part with base64 in the format of an API."""
    if path == MESSAGES:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    url = f"data:image/png;base64,{data}"
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def text(path: str, words: str) -> dict[str, Any]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": words}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def seeing(**attributes: Any) -> FakeEngine:
    engine = FakeEngine()
    engine.no_images, engine.images_in_results = "", True
    for name, value in attributes.items():
        setattr(engine, name, value)
    return engine


async def ask(server: Server, path: str, messages: list[Any], **fields: Any) -> Any:
    options = {MESSAGES: {"max_tokens": 9}, "/generate": {"stream": False}}.get(path, {})
    return await server.post(path, **{NAMES[path]: messages, **options, **fields})


async def chat_of(path: str, messages: list[Any], engine: FakeEngine | None = None) -> Chat:
    """Return the chat that a request becomes."""
    async with serving(engine or seeing()) as server:
        answer = await ask(server, path, messages)
        assert answer.status_code == 200, answer.text
        (chat,) = server.engine.chats
    return chat


@pytest.mark.parametrize("path", NAMES)
async def test_images_of_the_user_become_bytes_among_the_texts(path: str) -> None:
    parts = [text(path, "a"), text(path, "b"), image(path, b64(b"one")), image(path, b64(LONG)), text(path, "c")]
    earlier = [{"role": "user", "content": [image(path, b64(b"old"))]}, {"role": "assistant", "content": "yes"}]
    chat = await chat_of(path, [*earlier, {"role": "user", "content": parts}])
    assert [message["content"] for message in chat.messages] == [
        [{"type": "image", "image": b"old"}],
        "yes",
        [
            {"type": "text", "text": "a\nb" if path == MESSAGES else "ab"},
            {"type": "image", "image": b"one"},
            {"type": "image", "image": LONG},
            {"type": "text", "text": "c"},
        ],
    ]


async def test_a_large_image_is_joined_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[int, bool]] = []

    def join(pieces: Sequence[bytes]) -> bytes:
        joined.append((len(pieces), threading.current_thread() is threading.main_thread()))
        return b"".join(pieces)

    monkeypatch.setattr(image_sources, "_join", join)
    async with serving(seeing()) as server:
        parts = [image(CHAT, b64(b"small")), image(CHAT, b64(LONG))]
        response = await ask(server, CHAT, [{"role": "user", "content": parts}])
        assert response.status_code == 200, response.text
        (chat,) = server.engine.chats
        assert [part["image"] for part in chat.messages[0]["content"]] == [b"small", LONG]
    assert joined == [(-(-len(b64(LONG)) // 2**18), False)]


def result(path: str, *parts: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """A tool call and its result."""
    if path == RESPONSES:
        return [
            {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": list(parts)},
        ]
    if path == MESSAGES:
        block = {"type": "tool_result", "tool_use_id": "c", "content": list(parts), **more}
        return [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "see", "input": {}}]},
            {"role": "user", "content": [block]},
        ]
    call = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": list(parts)}]


@pytest.mark.parametrize("path", NAMES)
async def test_images_in_results(path: str) -> None:
    messages = [{"role": "user", "content": "hi"}, *result(path, text(path, "it"), image(path, b64(b"one")))]
    chat = await chat_of(path, messages)
    content = [{"type": "text", "text": "it"}, {"type": "image", "image": b"one"}]
    assert (chat.messages[-1]["role"], chat.messages[-1]["content"]) == ("tool", content)
    chat = await chat_of(path, messages, seeing(images_in_results=False))
    left_out = "[image left out: this model reads images in messages of the user only]"
    assert chat.messages[-1]["content"] == ("it\n" if path == MESSAGES else "it") + left_out


async def test_a_failed_result_that_is_an_image_says_so() -> None:
    chat = await chat_of(MESSAGES, [{"role": "user", "content": "hi"}, *result(MESSAGES, image(MESSAGES, b64(b"one")))])
    assert chat.messages[-1]["content"] == [{"type": "image", "image": b"one"}]
    failed = result(MESSAGES, image(MESSAGES, b64(b"one")), is_error=True)
    chat = await chat_of(MESSAGES, [{"role": "user", "content": "hi"}, *failed])
    assert chat.messages[-1]["content"][0] == {"type": "text", "text": "Error:"}


async def test_the_url_may_be_a_string_and_the_media_type_anything() -> None:
    for url in ("data:;base64,AAAA", "DATA:text/plain;charset=utf-8;Base64,AAAA"):
        part = {"type": "image_url", "image_url": url}
        chat = await chat_of(CHAT, [{"role": "user", "content": [part]}])
        assert chat.messages[0]["content"] == [{"type": "image", "image": bytes(3)}]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"type": "image_url"}, "image_url", "an image must have it"),
    (CHAT, {"type": "image_url", "image_url": {}}, "image_url.url", "missing required field"),
    (CHAT, {"type": "image_url", "image_url": "https://example.com/a.png"}, "image_url", "fetches no URLs, because"),
    (CHAT, {"type": "image_url", "image_url": {"url": "HTTP://10.0.0.1/"}}, "image_url.url", "knob image_url_hosts"),
    (CHAT, {"type": "image_url", "image_url": "file:///etc/passwd"}, "image_url", "must be a data URL"),
    (CHAT, {"type": "image_url", "image_url": "/etc/passwd"}, "image_url", "must be a data URL"),
    (CHAT, {"type": "image_url", "image_url": "data:image/png,AAAA"}, "image_url", "must be a data URL"),
    (CHAT, {"type": "image_url", "image_url": "data:" + "x" * 300 + ";base64,AAAA"}, "image_url", "must be a data URL"),
    (CHAT, {"type": "image", "image": "a.png"}, "type", "not 'image'"),
    (CHAT, {"type": "input_audio"}, "type", "reads text and images, not 'input_audio'"),
    (RESPONSES, {"type": "input_image", "file_id": "file-1"}, "file_id", "no files are kept here"),
    (RESPONSES, {"type": "input_image", "image_url": "https://a.b/c"}, "image_url", "fetches no URLs"),
    (RESPONSES, {"type": "input_file", "file_id": "f"}, "type", "reads text and images, not 'input_file'"),
    (MESSAGES, {"type": "image"}, "source", "must have it"),
    (MESSAGES, {"type": "image", "source": "AAAA"}, "source", "must have it"),
    (MESSAGES, {"type": "image", "source": {"type": "base64"}}, "source.data", "must have it"),
    (MESSAGES, {"type": "image", "source": {"type": "url", "url": "https://a.b"}}, "source.url", "fetches no URLs"),
    (MESSAGES, {"type": "image", "source": {"type": "url"}}, "source.url", "must have it"),
    (MESSAGES, {"type": "image", "source": {"type": "text"}}, "source.type", "must be base64 or url"),
    (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.type", "no files are kept"),
    (MESSAGES, {"type": "document", "source": {}}, "type", "not 'document'"),
    *((path, image(path, ""), FIELDS[path], "is empty") for path in NAMES),
    *(
        (path, image(path, data), FIELDS[path], "is not base64")
        for path in NAMES
        for data in (
            "AAA",
            "AA=A",
            "A A=",
            "AAAA\n",
            "AA-_",
            "=",
            "AAAAA===",
            "ÄÄÄÄ",
            "AA==" * 2**17,
            PADDED,
            "A" * 2**20 + "?",
        )
    ),
]


async def test_refusals_name_the_field() -> None:
    async with serving(seeing()) as server:
        for path, part, field, words in REFUSED:
            answer = await ask(server, path, [{"role": "user", "content": [text(path, "see"), part]}])
            assert answer.status_code == 400, (part, answer.text)
            where = f"{NAMES[path]}[0].content[1].{field}"
            message, param = answer.json()["error"]["message"], answer.json()["error"].get("param", where)
            assert param == where, answer.text
            assert message.startswith(f"{where}: "), answer.text
            assert words in message, answer.text
        assert server.engine.chats == []


class Refusing(FakeEngine):
    """Refuses the last image of the last message, as the engine does."""

    async def encode_chat(self, messages: list[dict[str, Any]], *args: Any, **options: Any) -> Any:
        last = f"messages[{len(messages) - 1}].content[{len(messages[-1]['content']) - 1}]"
        raise InvalidRequestError(f"{last}: is a damaged or incomplete PNG; send the whole file", "messages")


async def test_errors_about_an_image_name_its_field_in_the_request() -> None:
    engine = Refusing()
    engine.no_images, engine.images_in_results = "", True
    async with serving(engine) as server:
        for path in NAMES:
            parts = [text(path, "a"), text(path, "b"), image(path, b64(b"one"))]
            for counted in {MESSAGES: ("", "/count_tokens"), RESPONSES: ("", "/input_tokens")}.get(path, ("",)):
                turns = [{"role": "user", "content": "hi"}, *result(path, *parts)]
                body = {NAMES[path]: turns, **({"max_tokens": 9} if path == MESSAGES and not counted else {})}
                answer = await server.post(path + counted, **body)
                assert answer.status_code == 400
                where = {
                    CHAT: "messages[2].content[2].image_url.url",
                    "/generate": "messages[2].content[2].image_url.url",
                    MESSAGES: "messages[2].content[0].content[2].source.data",
                    RESPONSES: "input[2].output[2].image_url",
                }[path]
                assert answer.json()["error"]["message"].startswith(f"{where}: is a damaged")


IMAGES = PromptImages((PlacedImage(digest=b"", width=1, height=1, pixels=b"", start=0, rows=1, columns=1),))


class Placing(FakeEngine):
    async def encode_chat(self, messages: list[dict[str, Any]], *args: Any, **options: Any) -> ChatPrompt:
        return ChatPrompt([1], False, IMAGES)


async def test_a_prompt_with_images_is_not_cut() -> None:
    engine = Placing()
    engine.no_images = ""
    messages = [{"role": "user", "content": [image(CHAT, b64(b"one"))]}]
    async with serving(engine) as server:
        cut = await ask(server, CHAT, messages, truncate_prompt_tokens=5)
        whole = await ask(server, CHAT, messages)
    assert cut.status_code == 400
    assert cut.json()["error"]["param"] == "truncate_prompt_tokens"
    assert whole.status_code == 200
    assert [one.options["images"] for one in engine.submitted] == [IMAGES]


def test_pieces() -> None:
    one = EncodedImage("a", "AAAA")
    assert content_of([]) == ""
    assert content_of(["a", "", "b"], "-") == "a--b"
    assert content_of([one]) == [{"type": "image", "image": one}]
    assert content_of(["", one, "a", "b"]) == [
        {"type": "text", "text": ""},
        {"type": "image", "image": one},
        {"type": "text", "text": "ab"},
    ]
