"""Unsupported fields are refused by name if they would change the answer, else accepted or logged once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from aengine.config import ServerConfig
from aengine.errors import InvalidRequestError
from aengine.http.entry.body import FIELDS, decode
from aengine.http.fields.unknown import _HARMLESS, RequestBody, UnknownFields
from aengine.http.native.generate import GenerateRequest
from aengine.http.openai.bodies import ChatRequest, CompletionRequest
from aengine.http.routes import operations
from aengine.http.state import ServerState
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
CALLS = {"tool_choice", "parallel_tool_calls"}
STRUCTS: Mapping[str, type[RequestBody]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    GENERATE: GenerateRequest,
}


# Fields of other endpoints that ask for the default behaviour.
OF_OTHERS: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"best_of": 1, "truncation": "auto"},
    COMPLETIONS: {"truncation": "disabled"},
    GENERATE: {"best_of": 1, "return_token_ids": True},
}


def raw(fields: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
    return decode(msgspec.json.encode(fields), FIELDS)


@functools.cache
def unknown_fields() -> UnknownFields:
    """Return the unknown fields of a server, which knows the fields of all endpoints."""
    state = ServerState(ServerConfig())
    operations(state)
    return state.unknown_fields


def check(path: str, **fields: Any) -> None:
    unknown_fields().check(raw(fields), STRUCTS[path], path)


@pytest.mark.parametrize("path", STRUCTS)
def test_fields_that_would_change_the_answer_are_refused_by_name(path: str) -> None:
    for name in STRUCTS[path].refused:
        outer, _, inner = name.partition(".")
        for value in ("x", {"a": 1}, [1]):
            with pytest.raises(InvalidRequestError, match=f"^{name}: .{{9}}") as error:
                check(path, **{outer: {inner: value} if inner else value})
            assert error.value.param == name


@pytest.mark.parametrize("path", STRUCTS)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens"), ("sampling_seed", "seed")],
)
def test_fields_with_another_name_are_refused_with_the_right_name(path: str, theirs: str, ours: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{theirs}: it is called {ours} here$"):
        check(path, **{theirs: 3})


@pytest.mark.parametrize("path", STRUCTS)
@pytest.mark.parametrize("name", ["typical_p", "tfs_z", "top_a", "mirostat", "xtc_probability", "dry_multiplier"])
def test_other_ways_to_draw_are_not_left_out_in_silence(path: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}: not supported; see "):
        check(path, **{name: 0.5})


@pytest.mark.parametrize("path", STRUCTS)
def test_values_that_ask_for_nothing_are_taken(path: str, caplog: pytest.LogCaptureFixture) -> None:
    for name, refused in STRUCTS[path].refused.items():
        outer, _, inner = name.partition(".")
        for value in (None, *refused.harmless):
            check(path, **{outer: {inner: value} if inner else value})
    for name, value in OF_OTHERS[path].items():
        check(path, **{name: value})
    for name in _HARMLESS - (CALLS if path == GENERATE else set()):
        check(path, **{name: "x"})
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (COMPLETIONS, {"max_completion_tokens": 5}, "it is called max_tokens here"),
        (GENERATE, {"max_completion_tokens": 5}, "it is called max_tokens here"),
        (COMPLETIONS, {"tools": [{}]}, "/v1/completions has no such field"),
        (COMPLETIONS, {"messages": [{}]}, "/v1/completions has no such field"),
        (CHAT, {"echo": True}, "/v1/chat/completions has no such field"),
        (CHAT, {"suffix": "x"}, "/v1/chat/completions has no such field"),
        (COMPLETIONS, {"fill_context": True}, "/v1/completions has no such field"),
        (CHAT, {"fill_context": True}, "/v1/chat/completions has no such field"),
        (GENERATE, {"best_of": 3}, "/generate has no such field"),
        (GENERATE, {"return_tokens_as_token_ids": True}, "/generate has no such field"),
        (CHAT, {"best_of": 2}, "/v1/chat/completions has no such field"),
        (CHAT, {"add_special_tokens": True}, "its template"),
        (COMPLETIONS, {"add_special_tokens": False}, "the tokenizer's"),
        (GENERATE, {"tool_choice": "required"}, "calls are neither forced nor restricted here"),
        (GENERATE, {"tool_choice": "none"}, "calls are neither forced nor restricted here"),
        (GENERATE, {"parallel_tool_calls": False}, "calls are neither forced nor restricted here"),
        (CHAT, {"text": {"format": {"type": "json_object"}}}, "send response_format"),
    ],
)
def test_fields_of_the_other_endpoints_are_refused(path: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check(path, **fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"echo": False, "suffix": "", "add_special_tokens": False, "prompt": None}),
        (COMPLETIONS, {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "add_special_tokens": True}),
        (GENERATE, {"stream_options": {"include_usage": True}, "tool_choice": "auto", "parallel_tool_calls": True}),
        (CHAT, {"text": {"verbosity": "low"}}),
    ],
)
def test_harmless_values_of_refused_fields_are_accepted(path: str, fields: dict[str, Any]) -> None:
    check(path, **fields)


def test_openais_own_client_has_no_field_that_is_merely_unknown() -> None:
    for path, params in ((CHAT, chat_create_params), (COMPLETIONS, completion_create_params)):
        names = params.CompletionCreateParamsBase.__annotations__.keys()
        assert names - STRUCTS[path].__struct_fields__ <= STRUCTS[path].refused.keys() | _HARMLESS


def test_an_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields()
    for _ in range(3):
        fields.check(raw({"\x1b[31m\n\xe9x": {"secret": 1}}), ChatRequest, CHAT)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("aengine", logging.WARNING)
    assert r"field '\x1b[31m\n\xe9x', which is not known here" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_however_many_there_are(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields()
    for number in range(1000):
        fields.check(raw({f"{number}{'x' * 500}": 1}), ChatRequest, CHAT)
    assert len(caplog.records) == 256
    assert caplog.records[-1].getMessage().endswith("further names are not logged")
    assert sum(len(record.getMessage()) for record in caplog.records) < 50_000


async def test_a_server_refuses_before_it_asks_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        answer = await server.post(CHAT, messages=[{"role": "user", "content": "a"}], functions=[{"name": "f"}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "functions")
        assert server.engine.submitted == []
        for path in ("/v1/generate", "/generate"):
            assert (await server.post(path, prompt="a", never_heard_of=1)).status_code == 200
    assert caplog.text.count("never_heard_of") == 1
