"""The size, type and form of bodies. Every refusal is an error in OpenAI's format and names the field."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from aengine.errors import InvalidRequestError
from aengine.http.entry.body import _whole_numbers, decode
from aengine.http.entry.malformed import find_unencodable
from aengine.http.openai.bodies import ChatRequest
from tests.http.serving import read_until, serving

pytestmark = pytest.mark.anyio

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"

BAD_BODIES: list[tuple[str, bytes, str | None, str]] = [
    # path, body, param, part of the message
    (GENERATE, b"", None, "empty"),
    (GENERATE, b"{", None, "JSON"),
    (GENERATE, b'{"prompt": "a"} x', None, "JSON"),
    (GENERATE, b'{"prompt": NaN}', "prompt", "JSON has no NaN"),
    (GENERATE, b"prompt=hello&x=1", None, "JSON"),
    (GENERATE, b"null", None, "object"),
    (GENERATE, b"[]", None, "object"),
    (GENERATE, b'{"prompt": "\xff"}', "prompt", "UTF-8"),
    (GENERATE, b'{"prompt": "\xff"', None, "UTF-8"),
    (GENERATE, b'{"prompt": "\xed\xa0\x80"}', "prompt", "UTF-8"),
    (GENERATE, b'{"prompt": "\\ud800"}', "prompt", "surrogate"),
    (GENERATE, b'{"prompt": "a", "x": {"\\ud800": 1}}', "x", "name"),
    (GENERATE, b'{"prompt": "a", "x": [[], {"y": ["b", -Infinity]}]}', "x[1].y[1]", "-Infinity"),
    (GENERATE, b'{"prompt": "' + b"a" * 70_000 + b'", "min_p": NaN}', None, "byte"),
    (GENERATE, b'{"x":' * 50_000, None, "nested"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"a":' + b"[" * 50_000, None, "nested"),
    (GENERATE, b'{"prompt": true}', "prompt", "bool"),
    (GENERATE, b'{"input_ids": [1, "a"]}', "input_ids[1]", "str"),
    (GENERATE, b'{"input_ids": [1.5]}', "input_ids[0]", "float"),
    (GENERATE, b'{"prompt": "a", "max_tokens": "5"}', "max_tokens", "str"),
    (GENERATE, b'{"prompt": "a", "max_tokens": 1e400}', "max_tokens", "range"),
    (GENERATE, b'{"prompt": "a", "max_tokens": 0}', "max_tokens", "0"),
    (GENERATE, b'{"prompt": "a", "max_tokens": -1}', "max_tokens", "-1"),
    (GENERATE, b'{"prompt": "a", "max_tokens": 1000000000000000000000}', "max_tokens", "<="),
    (GENERATE, b'{"prompt": "a", "seed": 1' + b"0" * 10_000 + b"}", "seed", ""),
    (GENERATE, b'{"prompt": "a", "temperature": 3}', "temperature", "between"),
    (GENERATE, b'{"prompt": "a", "temperature": 1e999}', "temperature", "range"),
    (GENERATE, b'{"prompt": "a", "top_p": 0}', "top_p", "top_p"),
    (GENERATE, b'{"prompt": "a", "top_k": -2}', "top_k", "top_k"),
    (GENERATE, b'{"prompt": "a", "n": 129}', "n", "128"),
    (GENERATE, b'{"prompt": "a", "logprobs": 21}', "logprobs", "20"),
    (GENERATE, b'{"prompt": "a", "stop": ["a", 1]}', "stop[1]", "int"),
    (GENERATE, b'{"prompt": "a", "stop": [""]}', "stop", "characters"),
    (GENERATE, b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias", "int"),
    (GENERATE, b'{"prompt": "a", "logit_bias": {"1": "x"}}', "logit_bias", "float"),
    (GENERATE, b'{"prompt": "a", "logit_bias": {"1000": 1}}', "logit_bias", "1000"),
    (COMPLETIONS, b"{}", "prompt", "missing"),
    (COMPLETIONS, b'{"prompt": null}', "prompt", "null"),
    (COMPLETIONS, b'{"prompt": [[1], [2, "x"]]}', "prompt[1][1]", "str"),
    (COMPLETIONS, b'{"prompt": "a", "stream_options": 1}', "stream_options", "int"),
    (CHAT, b"{}", "messages", "missing"),
    (CHAT, b'{"messages": []}', "messages", "length"),
    (CHAT, b'{"messages": [{"content": "a"}]}', "messages[0].role", "missing"),
    (CHAT, b'{"messages": [{"role": "robot", "content": "a"}]}', "messages[0].role", "robot"),
    (CHAT, b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", "int"),
    (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0].type", ""),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "logprobs": 3}', "logprobs", "int"),
]


async def test_bad_bodies_are_refused_by_name() -> None:
    async with serving() as server:
        for path, body, param, words in BAD_BODIES:
            response = await server.client.post(path, content=body)
            case = f"{path} {body[:60]!r}: {response.text[:300]}"
            assert response.status_code == 400, case
            assert response.headers["content-type"] == "application/json", case
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, case
            assert error["type"] == "invalid_request_error", case
            assert error["param"] == param, case
            assert words in error["message"], case
            assert "Traceback" not in response.text, case
        assert server.engine.submitted == []


@pytest.mark.parametrize(
    "content_type",
    [None, "application/json", "Application/JSON; charset=utf-8", "application/x-www-form-urlencoded"],
)
async def test_json_is_read_whatever_curl_calls_it(content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with serving() as server:
        response = await server.client.post(GENERATE, content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}, {"Content-Encoding": "gzip"}],
)
async def test_other_types_are_not(headers: dict[str, str]) -> None:
    async with serving() as server:
        response = await server.client.post(GENERATE, content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


async def chunks(total: int) -> AsyncIterator[bytes]:
    for start in range(0, total, 4096):
        yield b" " * min(4096, total - start)


async def test_a_body_is_bounded() -> None:
    async with serving(max_body_bytes=10_000) as server:
        fits = await server.client.post(GENERATE, content=b'{"prompt":"a"}'.ljust(10_000))
        declared = await server.client.post(GENERATE, content=b'{"prompt":"a"}'.ljust(10_001))
        undeclared = await server.client.post(GENERATE, content=chunks(20_000))
        much = await server.client.post(GENERATE, content=chunks(1_000_000))
        much_declared = await server.client.post(GENERATE, content=b" " * 1_000_000)
    assert fits.status_code == 200
    for response in (declared, undeclared, much, much_declared):
        assert response.status_code == 413
        assert "10,000 bytes" in response.json()["error"]["message"]


async def test_a_body_that_is_too_long_is_refused_before_it_has_arrived() -> None:
    async with serving(max_body_bytes=10) as server:
        raw = await server.connect(GENERATE)
        await read_until(raw, b"}}")
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(raw, head)
        answer = await read_until(raw, b"}}")
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"\r\nconnection: close\r\n" in answer.lower()
        raw.close()


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error() -> None:
    async with serving() as server:
        raw = await server.connect(GENERATE)
        await read_until(raw, b"}}")
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        await asyncio.get_running_loop().sock_sendall(raw, head)
        raw.close()
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"prompt": "a", "max_tokens": ' + b"1" * 5_000_000 + b"}", 413, "digits"),
        (b'{"prompt": [1.' + b"0" * 5_000_000 + b"]}", 413, "digits"),
        (b'{"prompt": "' + b"7" * 2_097_152 + b'", "max_tokens": 1}', 200, ""),  # the longest allowed text
        (b'{"prompt": "' + b"\\n" * 5_000_000 + b'"}', 413, "escapes"),
        (b'{"prompt": "' + b"\\n" * 2_097_152 + b'", "max_tokens": 1}', 200, ""),
        (b'{"prompt": "a", %b}' % b",".join(b'"%d": 1' % number for number in range(1000)), 400, "1001 fields"),
    ],
    ids=["a number", "a number within", "a text", "escapes", "a text of escapes", "fields"],
)
async def test_bodies_that_would_block_the_loop_are_refused(body: bytes, status: int, words: str) -> None:
    async with serving() as server:
        headers = {"content-type": "application/json"}
        answer = await server.client.post(COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == status
    assert words in answer.text


def test_floats_in_unknown_fields_are_left_as_they_are() -> None:
    """There may be many, and they are not read."""
    body = b'{"messages": [], "max_tokens": 2.0, "x": 1.0, "seed": 1.' + b"0" * 100 + b"}"
    whole = bytes(_whole_numbers(body, msgspec.json.Decoder(ChatRequest)))
    assert b'"max_tokens":2,' in whole
    assert b'"x":1.0,' in whole
    assert whole.endswith(b"0" * 100 + b"}")


async def test_unknown_fields_are_ignored() -> None:
    async with serving() as server:
        response = await server.post(GENERATE, prompt="a", user="me", metadata={"any": ["thing"]})
    assert response.status_code == 200


def param_of(struct: type[Any], body: bytes) -> str | None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, msgspec.json.Decoder(struct))
    return caught.value.param


def test_the_param_of_a_nested_field() -> None:
    class Strict(msgspec.Struct, forbid_unknown_fields=True):
        inner: dict[str, int] = {}

    assert param_of(Strict, b'{"other": 1}') == "other"
    assert param_of(Strict, b'{"inner": {"a": "b"}}') == "inner"
    assert param_of(ChatRequest, b'{"messages": [{"role": "user"}, {}]}') == "messages[1].role"


def test_long_names_above_long_lists_cost_nothing_to_look_through() -> None:
    body = b'{"a":NaN,"' + b"a" * 32_000 + b'":[' + b"0," * 16_000 + b"0]}"
    begun = time.process_time()
    assert find_unencodable(body) == ("a", "JSON has no NaN")
    assert time.process_time() - begun < 1  # quadratic time would be minutes


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("max_tokens", "4.0", 4),
        ("max_completion_tokens", "1e2", 100),
        ("seed", "-3.0", -3),
        ("n", "1.00", 1),
        ("temperature", "1.0", 1.0),
    ],
)
def test_a_whole_number_may_be_written_as_a_float(field: str, text: str, value: float) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "4.0"}}], "{field}": {text}, "top_k": 2.0}}'
    read = decode(body.encode(), msgspec.json.Decoder(ChatRequest))
    assert (getattr(read, field), read.top_k, read.messages[0].content) == (value, 2, "4.0")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [{"role": "user"}], "max_tokens": 4.5}', "max_tokens"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 4.0, "n": 1.5}', "n"),
        (b'{"messages": [{"role": "user"}], "n": 2.0, "stop_token_ids": [1.0]}', "stop_token_ids[0]"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 1e300}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": 1.0}]}', "messages[0].content"),
        (b"1.0", None),
        (b"[1.0]", None),
    ],
)
def test_but_nothing_else(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as error:
        decode(body, msgspec.json.Decoder(ChatRequest))
    assert error.value.param == param
