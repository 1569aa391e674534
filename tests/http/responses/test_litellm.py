"""litellm's `responses` with an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import pytest

# A warning of pydantic about litellm's types.
pytestmark = pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning")


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise litellm downloads it
        module = pytest.importorskip("litellm", reason="litellm is not installed: pip install '.[litellm]'")
    module.telemetry = False
    return module


@pytest.fixture
def requested(demo_url: str) -> dict[str, Any]:
    return {
        "model": "openai/aengine-demo",
        "api_base": f"{demo_url}/v1",
        "api_key": "none",
        "temperature": 0,
        "num_retries": 0,
    }


FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def test_an_answer_and_its_usage(litellm: Any, requested: dict[str, Any]) -> None:
    response = litellm.responses(**requested, input="What is 17 + 25?")
    assert response.output[0].content[0].text == "17 + 25 = 42."
    assert response.usage.output_tokens == 12


def test_a_stream(litellm: Any, requested: dict[str, Any]) -> None:
    events = list(litellm.responses(**requested, input="What is 17 + 25?", stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "17 + 25 = 42."
    assert events[-1].type == "response.completed"


def test_a_call(litellm: Any, requested: dict[str, Any]) -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    first = litellm.responses(**requested, input=[question], tools=[FUNCTION])
    (call,) = first.output
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21, "sky": "sunny"}'}
    second = litellm.responses(**requested, input=[question, call.model_dump(), result], tools=[FUNCTION])
    assert second.output[0].content[0].text == "It is 21 degrees and sunny in Paris."
