"""`/openapi.json`, and whether the server follows it for every request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance

from aengine.config import ServerConfig
from aengine.http.operation import Operation
from aengine.http.routes import operations
from aengine.http.state import ServerState
from tests.http.demo_server import demo_server
from tests.http.serving import serving

KEY = "a-key"
KEY_HEADER = {"Authorization": f"Bearer {KEY}"}
BOUNDED = settings(
    max_examples=max(20, settings.default.max_examples // 4),
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CONTEXT = 64  # tokens; bounds what a generated request can cost


NOT_THE_DEMOS = ("/classify",)  # the demo model has no classes
OPERATIONS = operations(ServerState(ServerConfig()))
MISFITS = ("/generate", "/v1/models/{model}")  # the other endpoints are among the slow tests
FITTING = (*MISFITS, "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/health")  # the same


def modes(operation: Operation) -> list[tuple[GenerationMode, tuple[str, ...]]]:
    """Return the kinds of requests for an operation, and the paths for which they are quick.

    A request without input cannot be wrong. Two paths to one handler need one test.
    """
    fits, misfits = (GenerationMode.POSITIVE, FITTING), (GenerationMode.NEGATIVE, MISFITS)
    first = next(one for one in OPERATIONS if one.handler == operation.handler)
    return [fits, misfits] if first is operation and has_input(operation) else [fits]


def has_input(operation: Operation) -> bool:
    return operation.body is not None or bool(operation.query) or "{" in operation.path


@pytest.fixture(scope="module")
def short_demo() -> Iterator[str]:
    with demo_server({"max_model_len": CONTEXT}, api_keys=(KEY,), tokenizer_info=True) as url:
        yield url


@pytest.fixture(scope="module")
def described(short_demo: str) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{short_demo}/openapi.json", headers=KEY_HEADER)


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("requested", "mode"),
    [
        pytest.param(
            one, mode, marks=() if one.template in quick else pytest.mark.slow, id=f"{one.method}-{one.template}-{mode}"
        )
        for one in OPERATIONS
        for mode, quick in modes(one)
    ],
)
def test_every_answer_is_as_described(described: BaseSchema, requested: Operation, mode: GenerationMode) -> None:
    """Valid and invalid requests get no 5xx, no undescribed status and no body of another shape."""
    path = requested.template
    operation = described[path][requested.method]

    @settings(BOUNDED, max_examples=BOUNDED.max_examples if has_input(requested) else 1)
    @given(operation.as_strategy(generation_mode=mode))
    def holds(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            make_likelier(case.body)
        # Rules that a schema cannot express (the vocabulary's size, lengths in tokens) may lead to refusals.
        response = case.call_and_validate(headers=KEY_HEADER, timeout=30, excluded_checks=[positive_data_acceptance])
        statuses[response.status_code] += 1

    statuses: Counter[int] = Counter()
    holds()
    assert statuses
    off = "{" in path or "lora" in path or path in ("/sleep", "/wake_up", "/reload")
    assert statuses[200] or (mode is GenerationMode.NEGATIVE) or off or path in NOT_THE_DEMOS


FORMS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "shown_special_ids")


@pytest.mark.slow
@pytest.mark.hypothesis
@pytest.mark.parametrize(
    "fields",
    [TOOLS, *(pytest.param((form,), marks=pytest.mark.slow) for form in ("response_format", *FORMS))],
    ids=lambda fields: str(fields[0]),
)
def test_answers_with_structured_output_or_tools_are_as_described(short_demo: str, fields: tuple[str, ...]) -> None:
    """Random requests seldom have these fields; here they always have them."""
    document = httpx2.get(f"{short_demo}/openapi.json", headers=KEY_HEADER, trust_env=False).json()
    request = document["components"]["schemas"]["ChatRequest"]
    requested = ("messages", "max_tokens", "stream", *fields)
    request["properties"] = {name: without_null(request["properties"][name]) for name in requested}
    request["required"] = requested
    operation = schemathesis.openapi.from_dict(document)["/v1/chat/completions"]["POST"]

    @BOUNDED
    @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def holds(case: schemathesis.Case) -> None:
        make_likelier(case.body)
        response = case.call_and_validate(
            base_url=short_demo, headers=KEY_HEADER, timeout=30, excluded_checks=[positive_data_acceptance]
        )
        statuses[response.status_code] += 1

    statuses: Counter[int] = Counter()
    holds()
    assert sum(statuses.values()) == BOUNDED.max_examples


def without_null(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return {"anyOf": kinds} if kinds else schema


def make_likelier(body: Any) -> None:
    """Replace unknown models and invalid tokens, which most random requests have."""
    if isinstance(body, dict):
        for name in ("model", "input_ids", "logit_bias", "stop_token_ids", "stream_options", "best_of", "suffix"):
            body.pop(name, None)
        for name, value in body.items():
            if isinstance(value, float) and value.is_integer():
                body[name] = int(value)  # a schema accepts it as an integer
        for name in ("max_tokens", "max_completion_tokens", "min_tokens", "n"):
            if isinstance(body.get(name), int):
                body[name] = 1 + body[name] % 8
        for message in body.get("messages") or ():
            for part in message["content"] if isinstance(message.get("content"), list) else ():
                part["type"], part["text"] = "text", part.get("text") or ""
        if "text_1" in body or "queries" in body:  # a schema cannot require both fields with equal lengths
            for name in ("text_1", "text_2", "queries", "documents", "instruction"):
                body.pop(name, None)
            body["text_1"], body["text_2"] = "a text", ["another", "a third"]
        if "query" in body:  # most random texts do not fit the context together
            body["query"] = shorter(body["query"])
            body["documents"] = [
                {**each, "text": shorter(each["text"])} if isinstance(each, dict) else shorter(each)
                for each in body["documents"]
            ]
        if "input" in body:
            make_response_likelier(body)
        elif "messages" not in body and not isinstance(body.get("prompt"), str):
            body["prompt"] = "a prompt"


def shorter(text: str) -> str:
    return text[:4] or "a"


def make_response_likelier(body: dict[str, Any]) -> None:
    """Replace most texts by valid types and ids."""
    for name in ("previous_response_id", "truncation", "top_logprobs", "max_output_tokens"):
        body.pop(name, None)
    items = body["input"] if isinstance(body["input"], list) else []
    for item in (each for each in items if isinstance(each, dict)):  # items may be texts or ids
        kind = {"call_id": "function_call_output", "summary": "reasoning"}
        item["type"] = next((kind[name] for name in kind if name in item), "message")
        if item["type"] == "message":
            item["role"] = item.get("role") or "user"
        for name in ("content", "output", "summary"):
            item[name] = item.get(name) or []
            for part in item[name] if isinstance(item[name], list) else ():
                part["type"], part["text"] = "input_text", part.get("text") or ""
    for tool in body.get("tools") or ():
        tool["type"], tool["name"] = ("custom" if tool.get("strict") else "function"), tool.get("name") or "f"
        tool.pop("format", None)


@pytest.mark.anyio
@pytest.mark.parametrize("keys", [(), (KEY,)])
async def test_the_document_and_the_server_require_a_key_for_the_same_paths(keys: tuple[str, ...]) -> None:
    async with serving(api_keys=keys) as server:
        document = (await server.client.get("/openapi.json", headers=KEY_HEADER)).json()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                answer = await server.client.request(method, path)
                assert (answer.status_code == 401) == ("security" in operation), path
    assert ("securitySchemes" in document["components"]) == bool(keys)


def test_the_schemas_have_the_ranges(demo: httpx2.Client) -> None:
    document = demo.get("/openapi.json").json()
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in fields["temperature"]["anyOf"]
    assert {"type": "integer", "minimum": 1, "maximum": 128} in fields["n"]["anyOf"]
    assert {"type": "integer", "minimum": 0, "maximum": 20} in fields["logprobs"]["anyOf"]
    assert fields["stop"]["anyOf"][1]["maxItems"] == 16
