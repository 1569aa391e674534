"""langchain's chat model in its mode for this API."""

from __future__ import annotations

from typing import Any

import pytest

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed: pip install '.[clients]'", exc_type=ImportError
)

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from pydantic import BaseModel  # noqa: E402

QUESTION = "What is the weather in Paris?"
ANSWER = "It is 21 degrees and sunny in Paris."


class Sum(BaseModel):
    left: int
    right: int


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return '{"temperature": 21, "sky": "sunny"}'


@pytest.fixture
def model(demo_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model="aengine-demo",
        base_url=f"{demo_url}/v1",
        api_key="none",
        use_responses_api=True,
        temperature=0,
        max_retries=0,
        timeout=30,
    )


def joined(chunks: Any) -> Any:
    first, *others = chunks
    for chunk in others:
        first += chunk
    return first


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_answered(model: Any, streamed: bool) -> None:
    bound = model.bind_tools([get_weather])
    conversation: list[Any] = [HumanMessage(QUESTION)]
    reply = joined(bound.stream(conversation)) if streamed else bound.invoke(conversation)
    assert isinstance(reply, AIMessage)
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    conversation += [reply, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    answer = joined(bound.stream(conversation)) if streamed else bound.invoke(conversation)
    assert answer.text == ANSWER
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


def test_a_thought_is_given_and_taken_back(model: Any) -> None:
    thinking = model.bind(reasoning={"effort": "low", "summary": "auto"})
    conversation: list[Any] = [HumanMessage("What is 17 + 25?")]
    reply = joined(thinking.stream(conversation))
    (thought,) = [block for block in reply.content_blocks if block["type"] == "reasoning"]
    assert thought["reasoning"].startswith("Ones:")
    assert reply.text == "17 + 25 = 42."
    assert thinking.invoke([*conversation, reply, HumanMessage("What is 1 + 2?")]).text


def test_an_answer_has_a_models_form(model: Any) -> None:
    assert isinstance(model.with_structured_output(Sum, method="json_schema").invoke("What is 17 + 25?"), Sum)
    assert isinstance(model.with_structured_output(Sum, method="function_calling").invoke("What is 17 + 25?"), Sum)
