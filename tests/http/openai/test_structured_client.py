"""Structured output through the whole server with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.http.demo_server import DemoEngine
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio


class Step(BaseModel):
    model_config = ConfigDict(extra="forbid")  # otherwise a model at high temperature may add fields for ever

    number: int
    kind: Literal["first", "second"]


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: Literal["walk", "run"]
    steps: tuple[Step, Step]
    note: bool | None


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


MESSAGES: Any = [{"role": "user", "content": "Make a plan."}]


@pytest.mark.slow
async def test_parse_and_streams_and_errors() -> None:
    async with serving(DemoEngine()) as server, client_of(server) as client:  # type: ignore[arg-type]
        parsed = await client.chat.completions.parse(
            model="aengine-demo", messages=MESSAGES, response_format=Plan, max_tokens=300
        )
        assert parsed.choices[0].finish_reason == "stop"
        assert isinstance(parsed.choices[0].message.parsed, Plan)

        text = ""
        extra = {"structured_outputs": {"json": Plan.model_json_schema()}}
        async for chunk in await client.chat.completions.create(
            model="aengine-demo",
            messages=MESSAGES,
            stream=True,
            max_tokens=300,
            temperature=1.5,
            seed=1,
            extra_body=extra,
        ):
            text += chunk.choices[0].delta.content or ""
        Plan.model_validate(json.loads(text))

        choice = await client.completions.create(
            model="aengine-demo", prompt="Yes or no?", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert choice.choices[0].text in ("yes", "no")

        with pytest.raises(openai.BadRequestError, match="Invalid type: poem") as refused:
            await client.chat.completions.create(
                model="aengine-demo",
                messages=MESSAGES,
                response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "poem"}}},
            )
        assert refused.value.param == "response_format"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(
                model="aengine-demo", prompt="x", extra_body={"structured_outputs": {"regex": "("}}
            )
        assert refused.value.param == "structured_outputs.regex"
