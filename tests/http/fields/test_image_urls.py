"""Images by their URLs in the messages of every API, with an engine that decodes none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aengine.errors import InvalidRequestError
from aengine.http.fields import image_sources
from tests.http.fake_engine import FakeEngine
from tests.http.fetching.hosts import FileHost, answer, hosting_files
from tests.http.fields.test_images import CHAT, MESSAGES, NAMES, RESPONSES, ask, image, seeing, text
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

FIELDS = {CHAT: "image_url.url", "/generate": "image_url.url", MESSAGES: "source.url", RESPONSES: "image_url"}


def linked(path: str, url: str) -> dict[str, Any]:
    """Return a part with a URL in the format of an API."""
    if path == MESSAGES:
        return {"type": "image", "source": {"type": "url", "url": url}}
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    return {"type": "image_url", "image_url": {"url": url}}


def allowing(*hosts: FileHost, **knobs: Any) -> Any:
    """Serve an engine that takes images, and allow these hosts."""
    return serving(seeing(), image_url_hosts=tuple(f"127.0.0.1:{host.port}" for host in hosts), **knobs)


def at(host: FileHost, target: str = "/a.png") -> str:
    return f"http://127.0.0.1:{host.port}{target}"


async def refusal(server: Server, path: str, *parts: dict[str, Any]) -> str:
    """Return the text of a refusal, which must name the last part."""
    response = await ask(server, path, [{"role": "user", "content": [text(path, "see"), *parts]}])
    assert response.status_code == 400, response.text
    error, where = response.json()["error"], f"{NAMES[path]}[0].content[{len(parts)}].{FIELDS[path]}"
    assert error.get("param", where) == where
    assert error["message"].startswith(f"{where}: ")
    assert "127.0.0.1" not in error["message"]
    return str(error["message"].removeprefix(f"{where}: "))


@pytest.mark.parametrize("path", NAMES)
async def test_files_of_urls_become_bytes_among_the_texts(path: str) -> None:
    async with hosting_files(answer(b"far")) as host, allowing(host) as server:
        parts = [linked(path, at(host)), text(path, "a"), image(path, "b25l"), linked(path, at(host))]
        response = await ask(server, path, [{"role": "user", "content": parts}])
        assert response.status_code == 200, response.text
        (chat,) = server.engine.chats
        assert [part.get("image", part.get("text")) for part in chat.messages[0]["content"]] == [
            *(b"far", "a", b"one", b"far")
        ]
        assert len(host.requests) == 1  # the same URL twice


@pytest.mark.parametrize("path", NAMES)
async def test_refusals_name_the_field_and_the_remedy(path: str) -> None:
    async with hosting_files(answer(b"secret", status="403 No")) as host, hosting_files(b"") as other:
        async with allowing(host) as server:
            assert "its host answered with status 403; check" in await refusal(server, path, linked(path, at(host)))
            for url in (at(other), "http://localhost/", "http://169.254.169.254/latest", "http://[::ffff:7f00:1]/"):
                assert "knob image_url_hosts names; send" in await refusal(server, path, linked(path, url))
            for url in ("http://user@example.com/", "http://2130706433/", "http://a.b\\@c/"):
                assert "must be http:// or https://" in await refusal(server, path, linked(path, url))
            assert len(host.requests) == 1
            many = [linked(path, at(host, f"/{index}")) for index in range(5)]
            assert "knob image_url_hosts names; send" in await refusal(server, path, *many, linked(path, at(other)))
            assert len(host.requests) == 1  # nothing is fetched if another URL is refused
        async with serving(seeing()) as server:
            assert "this server fetches no URLs, because its knob" in await refusal(
                server, path, linked(path, at(host))
            )
        assert not other.connected.is_set()


async def test_the_tokens_of_images_by_url_are_counted() -> None:
    async with hosting_files(answer(b"far")) as host, allowing(host) as server:
        for path, of in (
            (MESSAGES, MESSAGES + "/count_tokens"),
            (RESPONSES, RESPONSES + "/input_tokens"),
            (CHAT, "/tokenize"),
        ):
            body = {NAMES[path]: [{"role": "user", "content": [linked(path, at(host))]}]}
            assert (await server.post(of, **body)).status_code == 200
        assert [chat.messages[0]["content"] for chat in server.engine.chats] == [
            [{"type": "image", "image": b"far"}]
        ] * 3


async def test_a_model_without_images_fetches_nothing() -> None:
    async with hosting_files(answer(b"far")) as host:
        engine = FakeEngine()
        engine.no_images = "it has no tower"
        async with serving(engine, image_url_hosts=(f"127.0.0.1:{host.port}",)) as server:
            for path in NAMES:
                response = await ask(server, path, [{"role": "user", "content": [linked(path, at(host))]}])
                assert response.status_code == 400
                assert f"{NAMES[path]}[0].content[0].type: the model takes no images" in response.text
        assert not host.connected.is_set()


class NoLateSystem(FakeEngine):
    async def encode_chat(self, messages: list[dict[str, Any]], *args: Any, **options: Any) -> Any:
        if any(message["role"] == "system" for message in messages[1:]):
            raise InvalidRequestError("messages: system only at the beginning", "messages")
        return await super().encode_chat(messages, *args, **options)


async def test_a_chat_that_is_rendered_twice_fetches_once() -> None:
    async with hosting_files(answer(b"far")) as host:
        engine = NoLateSystem()
        engine.no_images = ""
        async with serving(engine, image_url_hosts=(f"127.0.0.1:{host.port}",)) as server:
            turns = [{"role": "user", "content": [linked(MESSAGES, at(host))]}, {"role": "system", "content": "b"}]
            assert (await ask(server, MESSAGES, turns)).status_code == 200
        assert len(host.requests) == 1


async def test_the_number_of_urls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_sources, "_MOST_URLS", 3)
    async with hosting_files(answer(b"far")) as host, allowing(host) as server:
        parts = [linked(CHAT, at(host, f"/{index}")) for index in range(4)]
        assert "at most 3 URLs of a request are fetched; send" in await refusal(server, CHAT, *parts)
        assert not host.connected.is_set()


async def test_the_bytes_of_a_request_are_bounded_together() -> None:
    async with hosting_files(answer(b"x" * 3000)) as host, allowing(host, max_body_bytes=5000) as server:
        response = await ask(server, CHAT, [{"role": "user", "content": [linked(CHAT, at(host))]}])
        assert response.status_code == 200
        parts = [linked(CHAT, at(host, f"/{index}")) for index in range(2)]
        response = await ask(server, CHAT, [{"role": "user", "content": parts}])
        assert response.status_code == 400
        assert "is too large: all images of a request that are fetched share the server's max_body" in response.text


async def test_a_host_that_drips_is_left() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"", length=1000))
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with hosting_files(drip) as host, allowing(host, image_url_timeout=0.3) as server:
        while not host.requests:  # on a busy machine, the time may end before the host is asked
            assert "did not arrive within 0.3 seconds (the server's knob image_url_timeout)" in await refusal(
                server, CHAT, linked(CHAT, at(host))
            )
        async with asyncio.timeout(60):
            await host.left.wait()


async def test_a_client_that_leaves_ends_the_fetch() -> None:
    asked = asyncio.Event()

    async def hold(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"", length=1000))
        asked.set()
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with hosting_files(hold) as host, allowing(host, image_url_timeout=300) as server:
        body = {"messages": [{"role": "user", "content": [linked(CHAT, at(host))]}]}
        async with asyncio.timeout(60):
            client = await server.connect(CHAT, **body)
            await asked.wait()
            client.close()
            await host.left.wait()
        assert server.engine.chats == []


async def test_few_files_of_a_request_are_fetched_at_once() -> None:
    release = asyncio.Event()
    running = most = 0

    async def hold(writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == image_sources._AT_ONCE:
            asyncio.get_running_loop().call_later(0.05, release.set)  # a fifth one would come meanwhile
        await release.wait()
        running -= 1
        writer.write(answer(b"far"))

    async with hosting_files(hold) as host, allowing(host) as server:
        parts = [linked(CHAT, at(host, f"/{index}")) for index in range(12)]
        assert (await ask(server, CHAT, [{"role": "user", "content": parts}])).status_code == 200
        assert len(host.requests) == 12
    assert most == image_sources._AT_ONCE


async def test_a_kept_response_is_continued_with_its_images() -> None:
    async with hosting_files(answer(b"far")) as host, allowing(host, kept_responses=9) as server:
        first = await ask(server, RESPONSES, [{"role": "user", "content": [linked(RESPONSES, at(host))]}])
        more = await ask(server, RESPONSES, "and?", previous_response_id=first.json()["id"])  # type: ignore[arg-type]
        assert more.status_code == 200, more.text
        assert server.engine.chats[1].messages[0]["content"] == [{"type": "image", "image": b"far"}]
