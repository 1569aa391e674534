"""Prompts that are none, ids and lengths beyond their bounds, and bodies that are not JSON, or strange JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.one_in import one_in
from tests.reliability.bad_input.fields import BODIES
from tests.reliability.bad_input.hostile import API_KEY, Hostile

GENERATE, COMPLETIONS, CHAT = BODIES
TOKENIZE, DETOKENIZE, ABORT = "/tokenize", "/detokenize", "/abort"
USER = {"role": "user", "content": "hi"}
LONG = "hi " * 1000
MEGABYTE = "x" * 10**6
FORM = r"a string, a list of strings, a list of token ids or a list of lists"
TOOL = {"type": "function", "function": {"name": "f"}}

TOO_LONG = r"^This model.s maximum context length is 256 tokens\. However, "

# endpoint, body, param, words of the message
REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    (GENERATE, {}, "prompt", "exactly one of prompt, input_ids and messages"),
    (GENERATE, {"prompt": "a", "input_ids": [1]}, "prompt", "exactly one of"),
    (GENERATE, {"prompt": ""}, "prompt", "the prompt is empty"),
    (GENERATE, {"prompt": []}, "prompt", "the prompt is empty"),
    (GENERATE, {"input_ids": []}, "input_ids", "the prompt is empty"),
    (GENERATE, {"input_ids": [4096]}, "input_ids", "holds 4096; .* from 0 to 4095"),
    (GENERATE, {"input_ids": [5, -1]}, "input_ids", "holds -1"),
    (GENERATE, {"input_ids": [5] * 300}, "input_ids", "256 tokens. However, 300 tokens"),
    (GENERATE, {"messages": []}, "messages", "length >= 1"),
    (GENERATE, {"messages": [{"role": "user", "content": LONG}]}, "messages", TOO_LONG),
    (GENERATE, {"prompt": LONG}, "prompt", TOO_LONG),
    (GENERATE, {"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    (GENERATE, {"prompt": "a", "max_tokens": 257}, "max_tokens", TOO_LONG),
    (COMPLETIONS, {}, "prompt", "missing required"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "the prompt is empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", FORM),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "the prompt is empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "the prompt is empty"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt", FORM),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", FORM),
    (COMPLETIONS, {"prompt": [[1], 1]}, "prompt", FORM),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt", "at most 1024 choices"),
    (COMPLETIONS, {"prompt": ["a"] * 1024, "n": 128}, "n", "at most 1024 choices, 1024 prompts with n = 128"),
    (COMPLETIONS, {"prompt": ["a"] * 9, "n": 128}, "n", "would make 1152: send fewer prompts, or lower n"),
    (COMPLETIONS, {"prompt": ["a", LONG]}, "prompt", TOO_LONG),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs", "between 0 and 20"),
    (CHAT, {}, "messages", "missing required"),
    (CHAT, {"messages": []}, "messages", "length >= 1"),
    (CHAT, {"messages": [{}]}, "messages[0].role", "missing required"),
    (CHAT, {"messages": [USER, {"role": "root", "content": "a"}]}, "messages[1].role", "'root'"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", TOO_LONG),
    (CHAT, {"messages": [USER], "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    (CHAT, {"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens", "at least 1, got 0"),
    (CHAT, {"messages": [USER], "top_logprobs": 5}, "top_logprobs", "needs logprobs"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
        "an image must have it",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "must have it",
    ),
    (CHAT, {"messages": [USER], "tools": [TOOL] * 129}, "tools", "length <= 128"),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, "tool_choice", "no tools to choose from"),
    (CHAT, {"messages": [USER], "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    (TOKENIZE, {}, "prompt", "exactly one of prompt and messages"),
    (TOKENIZE, {"prompt": "a", "messages": [USER]}, "prompt", "exactly one of"),
    (TOKENIZE, {"messages": []}, "messages", "length >= 1"),
    (DETOKENIZE, {"tokens": [4096]}, "tokens", "from 0 to 4095"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens", "from 0 to 4095"),
    (DETOKENIZE, {"tokens": [2**64]}, "tokens[0]", "Expected `int`"),
    (DETOKENIZE, {"tokens": "a"}, "tokens", "Expected `array`"),
    (ABORT, {}, "request_id", "missing required"),
    (ABORT, {"request_id": ""}, "request_id", "length >= 1"),
    (ABORT, {"request_id": 3}, "request_id", "Expected `str`"),
]

# At all three endpoints that generate.
REFUSED_EVERYWHERE: list[tuple[dict[str, Any], str, str]] = [
    ({"stop": MEGABYTE}, "stop", "1 to 1024 characters"),
    ({"stop": ["a", MEGABYTE]}, "stop", "1 to 1024 characters"),
    ({"stop": [""]}, "stop", "1 to 1024 characters"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 stop strings, got 17"),
    ({"stop_token_ids": [4096]}, "stop_token_ids", "holds 4096; .* from 0 to 4095"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
    ({"shown_special_ids": [4096]}, "shown_special_ids", "holds 4096"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"bad_words": [MEGABYTE]}, "bad_words", "1 to 128 characters"),
    ({"bad_words": ["a"] * 257}, "bad_words", "at most 256"),
    ({"guided_regex": MEGABYTE}, "guided_regex", "1000000 characters, at most 131072"),
    ({"guided_choice": [MEGABYTE]}, "guided_choice", "1000000 characters, at most 131072"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
]


def test_refused_by_name(hostile: Hostile) -> None:
    for endpoint, body, param, words in REFUSED:
        hostile.refused(endpoint, body, param, words)
    for more, param, words in REFUSED_EVERYWHERE:
        for endpoint, body in BODIES.items():
            hostile.refused(endpoint, {**body, **more}, param, words)


def test_a_model_that_is_not_served(hostile: Hostile) -> None:
    for name in ("gpt-4", "", "../../etc/passwd", "\0", "x" * 10**6):
        for endpoint, body in BODIES.items():
            error = hostile.refused(endpoint, {**body, "model": name}, "model", "does not exist", status=404)
            assert (error["code"], error["type"]) == ("model_not_found", "invalid_request_error")
            assert len(error["message"]) < 2100


@pytest.mark.parametrize("endpoint", one_in(3, BODIES))
def test_truncated_anywhere(hostile: Hostile, endpoint: str) -> None:
    whole = json.dumps({**BODIES[endpoint], "user": "é😀", "logit_bias": {"5": -1.5}, "stop": ["a\n"]}).encode()
    for length in range(len(whole)):
        hostile.refused(endpoint, whole[:length], None, "not valid JSON|body is empty")
    assert hostile.post(endpoint, whole).status_code == 200


# body, words. An error outside any field names none.
NOT_JSON: dict[bytes, str] = {
    b"": "empty",
    b"hello": "not valid JSON",
    b"null": "Expected `object`, got `null`",
    b"[]": "Expected `object`, got `array`",
    b"3": "Expected `object`, got `int`",
    b'"a"': "Expected `object`, got `str`",
    b'{"prompt": "a"}{}': "not valid JSON",
    b"{'prompt': 'a'}": "not valid JSON",
    b'{"prompt": "a",}': "not valid JSON",
    b'{"prompt": "a", // x\n}': "not valid JSON",
    b'{"prompt": "\n"}': "not valid JSON",
    b'{"prompt": "\\x41"}': "not valid JSON",
    b'{"prompt": +1}': "not valid JSON",
    b'{"prompt": 01}': "not valid JSON",
    b'\xef\xbb\xbf{"prompt": "a"}': "not valid JSON",
    '{"prompt": "a"}'.encode("utf-16"): "not valid (JSON|UTF-8)",
    '{"prompt": "a"}'.encode("utf-32"): "not valid (JSON|UTF-8)",
    b"\x1f\x8b\x08\x00" + b"\x00" * 50: "not valid JSON",
    b"\x00" * 1000: "not valid JSON",
    b"prompt=a&max_tokens=1": "not valid JSON",
}


def test_not_json(hostile: Hostile) -> None:
    for body, words in NOT_JSON.items():
        for endpoint in (GENERATE, COMPLETIONS):
            hostile.refused(endpoint, body, None, words)


DEEP = 50_000  # twice as deep is too much to parse already


@pytest.mark.parametrize(
    "nested",
    [
        b'{"x":' * DEEP,
        b'{"x":' * DEEP + b"1" + b"}" * DEEP,
        b"[" * DEEP,
        b'{"%s, "x": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"%s, "x": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        b'{"%s, "tools": [{"type": "function", "function": {"name": "f", "parameters": ' + b'{"a":' * DEEP,
        b'{"%s, "chat_template_kwargs": {"a": ' + b"[" * DEEP + b"]" * DEEP + b"}}",
        b'{"%s, "guided_json": ' + b'{"items":' * DEEP + b"{}" + b"}" * DEEP + b"}",
        b'{"%s, "response_format": {"type": "json_schema", "json_schema": {"schema": ' + b'{"items":' * DEEP,
    ],
    ids=range(9),
)
def test_deep_json(hostile: Hostile, nested: bytes) -> None:
    for endpoint, body in BODIES.items():
        hostile.refused(
            endpoint,
            nested.replace(b'{"%s', json.dumps(body).encode()[:-1]),
            None,
            "nested too deeply|Expected `object`",
        )
        hostile.refused(endpoint, b'{"x":' * 10**5, None, "too many values", 413)
        hostile.refused(endpoint, b"[" * 10**5, None, "nested too deeply|Expected `object`")


def test_deep_but_readable_json_is_refused_by_name(hostile: Hostile) -> None:
    """What the parser takes, the grammar and the chat template have bounds of their own for."""
    deep: Any = {}
    for _ in range(100):
        deep = {"items": deep}
    chat = BODIES[CHAT]
    hostile.refused(CHAT, {**chat, "chat_template_kwargs": {"a": deep}}, "chat_template_kwargs", "more than 64 deep")
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    hostile.refused(CHAT, {**chat, "tools": [tool]}, "tools", "more than 64 deep")
    call = {"function": {"name": "f", "arguments": deep}}
    told = [{"role": "assistant", "tool_calls": [call]}]
    hostile.refused(CHAT, {**chat, "messages": told}, "messages", "more than 64 deep")
    for endpoint, body in BODIES.items():
        hostile.refused(endpoint, {**body, "guided_json": deep}, "guided_json", "deeper than 64 levels")


def test_of_duplicated_names_the_last_counts(hostile: Hostile) -> None:
    body = b'{"prompt": "x", "prompt": "The capital of France is", "max_tokens": 0, "max_tokens": 2, "temperature": 0}'
    answer = hostile.post(COMPLETIONS, body)
    assert answer.json()["choices"][0]["text"] == " Paris."
    hostile.refused(COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "max_tokens": 0}', "max_tokens", "at least 1")
    hostile.refused(CHAT, b'{"messages": [{"role": "user", "role": "x"}]}', "messages[0].role", "'x'")
    many = b"{" + b'"max_tokens": 1, ' * 10**5 + b'"prompt": "a"}'
    assert hostile.post(COMPLETIONS, many).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "text/html"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/xml"},
        {"Content-Type": "application/json, text/plain"},
        {"Content-Type": "application/x-msgpack"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br"},
    ],
    ids=lambda headers: " ".join(headers.values()),
)
def test_other_content_types(hostile: Hostile, headers: dict[str, str]) -> None:
    for endpoint in (*BODIES, TOKENIZE, DETOKENIZE, ABORT):
        response = hostile.post(endpoint, b'{"prompt": "a"}', **headers)
        assert response.status_code == 415, endpoint
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_media_type")
        assert "must be JSON" in error["message"] or "must not be compressed" in error["message"]


def test_a_connection_outlives_a_body_that_nobody_read(hostile: Hostile) -> None:
    """Refused for its type, its path or its key before it was read, which must not spoil the next request."""
    for path, headers in [
        ("/generate", {"Content-Type": "text/plain"}),
        ("/nowhere", {}),
        ("/generate", {"Authorization": ""}),
    ]:
        for _ in range(30):
            assert hostile.judged(hostile.client.post(path, content=b"x" * 200_000, headers=headers)).status_code in (
                401,
                404,
                415,
            )
            assert hostile.client.get("/health").status_code == 200


def test_wrong_doors_and_keys(hostile: Hostile) -> None:
    for method, path, status in [
        ("GET", "/generate", 405),
        ("PUT", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/nothing", 404),
        ("POST", "/v1/chat/completions/more", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/" + "a" * 5000, 404),
    ]:
        response = hostile.judged(hostile.client.request(method, path))
        assert response.status_code == status, path
    for key in ("", "Bearer", "Bearer x", f"Basic {API_KEY}", f"Bearer {API_KEY}x", f"Bearer {API_KEY[:-1]}"):
        response = hostile.judged(hostile.client.post("/generate", content=b"{}", headers={"Authorization": key}))
        assert response.status_code == 401, key


@pytest.mark.parametrize(
    "given",
    [
        b"caf\xe9",
        "日本".encode(),
        b"\xf0\x9f\x98\x80",
        b"\xff\xfe",
        b"a b",
        b"x" * 129,
        b"x" * 8000,
        b"\x7f",
        b"a\tb",
        b"",
    ],
    ids=repr,
)
def test_strange_request_ids_are_replaced_and_end_nothing(hostile: Hostile, given: bytes) -> None:
    body = json.dumps(BODIES[GENERATE])
    headers = [(b"x-request-id", given)]
    response = hostile.judged(hostile.client.post(GENERATE, content=body, headers=headers))
    assert response.status_code == 200
    told = response.headers["x-request-id"]
    assert told.encode("latin-1") != given
    assert told.isascii()
    assert told.isprintable()
    refused = hostile.judged(hostile.client.post(GENERATE, content=b"{", headers=headers))
    assert refused.status_code == 400
    assert refused.headers["x-request-id"].isascii()


def test_abort_by_an_id_that_is_none(hostile: Hostile) -> None:
    for request_id in ("日本", "😀", "\0", "a\r\nb", "x" * 10**6, "'; drop table", "None"):
        assert hostile.post(ABORT, {"request_id": request_id}).json() == {"aborted": 0}
    hostile.refused(ABORT, rb'{"request_id": "\ud800"}', "request_id", "Unicode")
