"""The form of the output reaches the engine from every API."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.requests.structured import Structured
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
COMPLETION = ("/v1/completions", {"prompt": "hi"})
GENERATE = ("/generate", {"prompt": "hi", "stream": False})

FORMS: list[tuple[dict[str, Any], Structured | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Structured(json_object=True, origin="response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        Structured(json=SCHEMA, strict=True, origin="response_format"),
    ),
    *(  # as in llama.cpp, TGI and others
        ({"response_format": {"type": kind, **where}}, Structured(json=SCHEMA, origin="response_format"))
        for kind in ("json_object", "json_schema")
        for where in ({"schema": SCHEMA}, {"value": SCHEMA}, {"json_schema": {"schema": SCHEMA}})
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Structured(json=SCHEMA, origin="structured_outputs.json")),
    ({"structured_outputs": {"json": "{}"}}, Structured(json="{}", origin="structured_outputs.json")),
    (
        {"structured_outputs": {"json_object": True}},
        Structured(json_object=True, origin="structured_outputs.json_object"),
    ),
    ({"structured_outputs": {"regex": "a+"}}, Structured(regex="a+", origin="structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Structured(choice=("a", "b"), origin="structured_outputs.choice")),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        Structured(grammar='start: "a"', origin="structured_outputs.grammar"),
    ),
    ({"guided_json": SCHEMA}, Structured(json=SCHEMA, origin="guided_json")),
    (  # as clients for several versions of vLLM ask
        {"structured_outputs": {"grammar": "start: /a/"}, "guided_grammar": "start: /a/"},
        Structured(grammar="start: /a/", origin="structured_outputs.grammar"),
    ),
    ({"guided_choice": ["a"], "response_format": {"type": "text"}}, Structured(choice=("a",), origin="guided_choice")),
]


@pytest.mark.parametrize(("fields", "structured"), FORMS)
@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION, GENERATE])
async def test_every_spelling(
    path: str, body: dict[str, Any], fields: dict[str, Any], structured: Structured | None
) -> None:
    async with serving() as server:
        answer = await server.post(path, **body, **fields)
        assert answer.status_code == 200
        (submitted,) = server.engine.submitted
    assert submitted.params.structured == structured
    assert submitted.params.temperature == 0.5  # the defaults stay


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"type": "object"}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}, "value": {"type": "object"}}}, "response_format"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"grammar": "root ::= [0-9]+"}, "grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"guided_regex": "a", "guided_grammar": "start: /a/"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a", "guided_grammar": "start: /a/"}, "guided_grammar"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
async def test_invalid_forms_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    path, body = CHAT
    async with serving() as server:
        answer = await server.post(path, **body, **fields)
        assert server.engine.submitted == []
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param in (error["param"], *error["message"].split("`"), *error["message"].split("$."))


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION, GENERATE])
@pytest.mark.parametrize(
    ("form", "param", "nearest"),
    [
        ({"type": "json_object", "shcema": SCHEMA}, "response_format.shcema", "schema"),
        ({"type": "json_object", "json_shema": {"schema": SCHEMA}}, "response_format.json_shema", "json_schema"),
        ({"type": "json_object", "x": 1}, "response_format.x", "schema"),
    ],
)
async def test_a_misspelled_schema_is_refused_with_the_right_name(
    path: str, body: dict[str, Any], form: dict[str, Any], param: str, nearest: str
) -> None:
    async with serving() as server:
        answer = await server.post(path, **body, response_format=form)
        assert server.engine.submitted == []
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert f"{nearest}" in error["message"].removeprefix(param)


@pytest.mark.parametrize("form", [{"type": "text", "x": 1}, {"type": "json_object", "schema": SCHEMA, "x": 1}])
async def test_unknown_keys_next_to_a_schema_are_ignored(form: dict[str, Any]) -> None:
    path, body = CHAT
    async with serving() as server:
        assert (await server.post(path, **body, response_format=form)).status_code == 200


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION, GENERATE])
async def test_the_temperature_of_a_grammars_rules_is_followed(path: str, body: dict[str, Any]) -> None:
    form = {"guided_grammar": "start[temperature=0.25]: /a/"}
    async with serving() as server:
        assert (await server.post(path, **body, **form)).status_code == 200
        refused = await server.post(path, **body, **form, temperature=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_grammar")
        (submitted,) = server.engine.submitted
    assert submitted.params.temperature == 0.25
