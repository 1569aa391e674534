"""Every field of requests and answers passes through a server unchanged.

A new field fails here until it has a case, which checks that it reaches the other side.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from aengine import Client, Engine, Fragment, InvalidRequestError, SamplingParams, Structured, Usage
from aengine.engine.requests.arguments import resolved_params
from aengine.engine.requests.stream import collect
from aengine.types import Choice, Completion, PromptLogprob, TokenLogprob, ToolCallDelta, TopLogprob
from tests.http.fake_engine import VOCAB_SIZE, WORDS, FakeEngine, FakeStream, FragmentStream, adapter_info
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

PARAMETERS: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 2,
    "temperature": 0.25,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.25,
    "frequency_penalty": -1.25,
    "logit_bias": {7: 2.5},
    "seed": -(2**63),
    "stop": ("x", "y"),
    "stop_in_thought": True,
    "unstopped": ("<a>", "</a>"),
    "stop_token_ids": (3,),
    "bad_words": ("bad",),
    "allowed_token_ids": (5, 7),
    "include_stop": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "shown_special_ids": (5,),
    "logprobs": 2,
    "prompt_logprobs": 3,
    "n": 2,
    "speculation": False,
    "structured": Structured(regex="yes|no"),
}
LOOSELY: dict[str, list[Any]] = {  # other ways to write it
    "stop": ["x", ["x", "y"], None, []],
    "stop_token_ids": [[3], None],
    "bad_words": ["bad", ["bad"], None],
    "logit_bias": [None, {}],
    "structured": [{"regex": "a", "thought": "open"}, {"choice": ["a", "b"]}],
    "temperature": [0],
}
STRUCTURED: dict[str, Any] = {
    "json": {"type": "object"},
    "json_object": True,
    "regex": "a+",
    "choice": ("a", "b"),
    "grammar": 'start: "a"',
    "thought": "possible",
    "calls": 'calls: "b"',
    "strict": True,
    "origin": "mine",
}
# A server always clips. Images of a prompt of ids come from the engine's own `encode_chat`.
LOCAL = ("clip", "images")
KINDS = ("json", "json_object", "regex", "choice", "grammar")
ROUTING: dict[str, Any] = {"request_id": "mine", "priority": -3, "cache_salt": "me", "adapter": "sql"}
CHAT: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    "template_kwargs": {"enable_thinking": True},
    "continue_final_message": True,
}
MESSAGES = [{"role": "user", "content": "hi"}]

CANDIDATES = (TopLogprob(3, "c", -0.5), TopLogprob(4, "d", -1.5))
SCORES = [
    PromptLogprob(1, -0.25, 1, [1, 2], [-0.25, -2.0]),  # the likeliest,
    PromptLogprob(2, -2.0, 2, [1, 2], [-0.25, -2.0]),  # another candidate,
    PromptLogprob(9, -7.5, 8, [1, 2], [-0.25, -2.0]),  # not among the likeliest,
    PromptLogprob(2, -1.0, 1, [1, 2], [-1.0, -1.0]),  # as likely as the first one,
    PromptLogprob(9, -math.inf, 1000, [1, 2], [-0.25, -math.inf]),  # and impossible
]
FRAGMENT: dict[str, Any] = {
    "text": "é👋",
    "token_ids": (7, 8),
    "logprobs": (TokenLogprob(7, "é", -0.25, CANDIDATES), TokenLogprob(8, "👋", -1.25)),
    "finish_reason": "stop",
    "usage": Usage(3, 4, 2),
    "index": 1,
    "prompt_logprobs": SCORES,
    "stop_string": "END",
    "reasoning": "I add.",
    "tool_calls": (ToolCallDelta(0, "{", "call_1", "add"), ToolCallDelta(0, "}")),
}


def fields_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


def test_every_field_has_a_case() -> None:
    assert set(fields_of(SamplingParams)) <= set(PARAMETERS)
    assert set(fields_of(Structured)) == set(STRUCTURED)
    assert set(fields_of(Fragment)) == set(FRAGMENT)
    for field in (*msgspec.structs.fields(SamplingParams), *msgspec.structs.fields(Fragment)):
        assert (PARAMETERS | FRAGMENT)[field.name] != field.default, field.name
    options = {*inspect.signature(Engine.submit).parameters} - {"self", "prompt", "params", "sampling", *LOCAL}
    assert options == set(ROUTING)
    options = {*inspect.signature(Engine.submit_chat).parameters} - {"self", "messages", "params", "sampling"}
    assert options == {*ROUTING, *CHAT}


@pytest.mark.parametrize("method", ["generate", "complete", "chat_stream", "chat", "submit", "submit_chat"])
def test_the_same_arguments(method: str) -> None:
    def arguments(model: type) -> list[inspect.Parameter]:
        parameters = inspect.signature(getattr(model, method)).parameters
        return [one for name, one in parameters.items() if name not in LOCAL]

    assert arguments(Client) == arguments(Engine)


async def arriving(*prompt: Any, **fields: Any) -> tuple[FakeEngine, FragmentStream]:
    """Return the request that arrives at a server's engine."""
    engine = FakeEngine()
    engine.adapters = [adapter_info("sql", "/a/sql")]
    async with serving(engine) as server, Client(server.url) as client:
        await client.complete(*(prompt or ("x",)), **fields)
        return server.engine, server.engine.submitted[0]


def in_this_process(params: SamplingParams | None, **sampling: Any) -> SamplingParams:
    """Return the parameters that `Engine` would make, by the way the caller gave the form."""
    return unnamed(resolved_params(FakeEngine().default_params, params, sampling, VOCAB_SIZE))


def unnamed(params: SamplingParams) -> SamplingParams:
    """Without the form's name in errors; `test_errors_name_a_form_like_its_caller` checks that."""
    form = params.structured
    return (
        params
        if form is None
        else msgspec.structs.replace(params, structured=msgspec.structs.replace(form, origin=None))
    )


@pytest.mark.parametrize("name", fields_of(SamplingParams))
async def test_a_parameter_arrives(name: str) -> None:
    for value in [PARAMETERS[name], *LOOSELY.get(name, [])]:
        _, submitted = await arriving(**{name: value})
        assert unnamed(submitted.params) == in_this_process(None, **{name: value})


@pytest.mark.parametrize("without", ["structured", "allowed_token_ids"])  # these two exclude each other
async def test_all_parameters_at_once_arrive(without: str) -> None:
    params = SamplingParams(**{name: PARAMETERS[name] for name in fields_of(SamplingParams) if name != without})
    assert unnamed((await arriving("x", params))[1].params) == in_this_process(params)
    assert (await arriving("x", SamplingParams()))[1].params == in_this_process(SamplingParams())


@pytest.mark.parametrize("name", fields_of(Structured))
async def test_a_form_arrives(name: str) -> None:
    form = Structured(**({} if name in KINDS else {"regex": "a"}), **{name: STRUCTURED[name]})
    _, submitted = await arriving(structured=form)
    assert unnamed(submitted.params) == in_this_process(None, structured=form)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (Structured(regex="("), "structured.regex"),
        (Structured(regex="(", origin="mine"), "mine"),
        (Structured(grammar="(", thought="open"), "structured.grammar"),
    ],
)
async def test_errors_name_a_form_like_its_caller(form: Structured, name: str) -> None:
    class Refusing(FakeEngine):
        def _admit(self, *given: Any) -> FakeStream:
            param = given[2].structured.param
            raise InvalidRequestError(f"{param} cannot be compiled", param)

    async with serving(Refusing()) as server, Client(server.url) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.complete("x", structured=form)
    assert (str(caught.value), caught.value.param) == (f"{name} cannot be compiled", name)


@pytest.mark.parametrize("name", ["priority", "cache_salt", "adapter"])
async def test_a_way_of_routing_arrives(name: str) -> None:
    assert (await arriving(**{name: ROUTING[name]}))[1].options[name] == ROUTING[name]


@pytest.mark.parametrize("name", CHAT)
async def test_an_option_of_chats_arrives(name: str) -> None:
    async with serving() as server, Client(server.url) as client:
        await client.chat(MESSAGES, **{name: CHAT[name]})
        assert getattr(server.engine.chats[0], name) == CHAT[name]


async def test_chunks_of_a_chat_use_openais_fields() -> None:
    """OpenAI's endpoint refuses the fields of `/generate`."""
    async with serving() as server, Client(server.url) as client:
        async with aclosing(client.chat_chunks(MESSAGES, temperature=0.25, template_kwargs={"a": 1})) as chunks:
            deltas = [choice["delta"] async for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "".join(WORDS)
        (submitted,) = server.engine.submitted
    assert (submitted.params.temperature, submitted.params.max_tokens) == (0.25, None)


@pytest.mark.parametrize("name", fields_of(Fragment))
async def test_a_field_of_a_fragment_comes_back(name: str) -> None:
    last = {"finish_reason": "stop"} if name in ("usage", "stop_string") else {}  # the two come together
    sent = Fragment(**({"text": ""} | last | {name: FRAGMENT[name]}))
    engine = FakeEngine(held=True)
    async with serving(engine) as server, Client(server.url) as client:
        fragments = client.generate("x", n=2, logprobs=2, prompt_logprobs=2)
        receiving = asyncio.create_task(anext(fragments))
        (await engine.next_stream()).put(sent)
        assert await receiving == sent
        await fragments.aclose()


async def test_a_completion_is_put_together_alike() -> None:
    """Fragments with all their fields give the same completion here and there."""
    usage = Usage(3, 4, 2)
    fragments = [Fragment(**(FRAGMENT | {"index": index, "usage": usage if index else None})) for index in (0, 1)]
    engine, here = FakeEngine(held=True), FakeStream("mine", 1, one_by_one=False)
    async with serving(engine) as server, Client(server.url) as client:
        options = {"n": 2, "logprobs": 2, "prompt_logprobs": 2, "request_id": "mine"}
        task = asyncio.create_task(client.complete("x", **options))
        for stream in (await engine.next_stream(), here):
            stream.put(*fragments)
        there = await task
    assert there == await collect(here)
    for struct in (there, *there.choices[1:]):
        for field in msgspec.structs.fields(type(struct)):
            assert getattr(struct, field.name) != field.default
    assert isinstance(there, Completion)
    assert isinstance(there.choices[1], Choice)
