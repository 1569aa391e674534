"""OpenAI's Agents SDK in its default mode, which uses this API."""

from __future__ import annotations

from typing import Any

import openai
import pytest

agents = pytest.importorskip("agents", reason="openai-agents is not installed: pip install '.[test]'")

pytestmark = pytest.mark.anyio

QUESTION = "What is the weather in Paris?"
ANSWER = "It is 21 degrees and sunny in Paris."


@pytest.fixture(autouse=True)
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")


async def agent(client: openai.AsyncOpenAI, requested: list[str], **settings: Any) -> Any:
    def get_weather(city: str) -> str:
        """Get the current weather of a city."""
        requested.append(city)
        return '{"temperature": 21, "sky": "sunny"}'

    return agents.Agent(
        name="weather",
        tools=[agents.function_tool(get_weather)],
        model=agents.OpenAIProvider(openai_client=client).get_model("aengine-demo"),
        model_settings=agents.ModelSettings(temperature=0, **settings),
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("thinks", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_an_agent_calls_its_tool_and_answers(demo_url: str, streamed: bool, thinks: bool) -> None:
    reasoning: Any = {"effort": "low", "summary": "auto"} if thinks else None
    cities: list[str] = []
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        weather = await agent(
            client, cities, reasoning=None if reasoning is None else openai.types.Reasoning(**reasoning)
        )
        assert isinstance(weather.model, agents.OpenAIResponsesModel)
        if streamed:
            result = agents.Runner.run_streamed(weather, QUESTION)
            kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
            assert kinds.count("response.completed") == 2
            assert "response.function_call_arguments.delta" in kinds
        else:
            result = await agents.Runner.run(weather, QUESTION)
        assert cities[0] == "Paris"
        if not thinks:  # the demo model's answer to a result after a thought is not determined
            assert result.final_output == ANSWER
            assert [item.type for item in result.new_items] == [
                "tool_call_item",
                "tool_call_output_item",
                "message_output_item",
            ]
        further = await agents.Runner.run(weather, [*result.to_input_list(), {"role": "user", "content": "hi"}])
    assert further.raw_responses[0].usage.input_tokens > 0


async def test_an_agent_whose_output_has_a_type(demo_url: str) -> None:
    from pydantic import BaseModel

    class Sum(BaseModel):
        left: int
        right: int

    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        model = agents.OpenAIProvider(openai_client=client).get_model("aengine-demo")
        adder = agents.Agent(name="adder", model=model, output_type=Sum)
        result = await agents.Runner.run(adder, "What is 17 + 25?")
    assert isinstance(result.final_output, Sum)
