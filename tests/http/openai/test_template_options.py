"""Options of the chat template: reasoning effort, beginning or continuing a message, and variables."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.http.serving import serving

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
BEGUN = [*QUESTION, {"role": "assistant", "content": "17 + 25 ="}]
PATHS = ("/v1/chat/completions", "/generate")


def text(demo: httpx2.Client, path: str, **body: Any) -> str:
    given = {"temperature": 0, "max_tokens": 60, "stream": False, "messages": QUESTION} | body
    response = demo.post(path, json=given)
    assert response.status_code == 200, response.text
    answer = response.json()
    return str(answer["choices"][0]["message"]["content"] if path == PATHS[0] else answer["text"])


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_continues_the_last_message(demo: httpx2.Client, path: str) -> None:
    whole = text(demo, path)
    assert whole.startswith("17 + 25 = 42")
    assert text(demo, path, messages=BEGUN, continue_final_message=True) == whole.removeprefix("17 + 25 =")
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "17 + 25 ="}]}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    assert text(demo, path, messages=begun, **flags) == whole.removeprefix("17 + 25 =")


def test_a_thought_is_continued_as_a_thought(demo: httpx2.Client) -> None:
    body = {"messages": QUESTION, "temperature": 0, "reasoning_effort": "high", "max_tokens": 200}
    whole = demo.post(PATHS[0], json=body).json()["choices"][0]["message"]
    begun = "<think>\n" + whole["reasoning_content"][:5]
    more = body | {"messages": [*QUESTION, {"role": "assistant", "content": begun}], "continue_final_message": True}
    rest = demo.post(PATHS[0], json=more).json()["choices"][0]["message"]
    assert rest["reasoning_content"] == whole["reasoning_content"][5:]
    assert rest["content"] == whole["content"]


def test_it_is_tokenized_as_it_is_sent(demo: httpx2.Client) -> None:
    for more in (
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
    ):
        count = demo.post("/tokenize", json={"messages": BEGUN} | more).json()["count"]
        answer = demo.post(PATHS[0], json={"messages": BEGUN, "max_tokens": 1} | more).json()
        assert answer["usage"]["prompt_tokens"] == count
    closed, begun = (
        demo.post("/tokenize", json={"messages": BEGUN} | more).json()["tokens"]
        for more in ({"add_generation_prompt": False}, {"continue_final_message": True})
    )
    assert closed[: len(begun)] == begun
    assert len(begun) < len(closed)


@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True, "messages": [{"role": "assistant"}]}, "continue_final_message"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ],
)
def test_refusals(demo: httpx2.Client, path: str, more: dict[str, Any], param: str) -> None:
    response = demo.post(path, json={"messages": QUESTION} | more)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert param in response.json()["error"]["message"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "minimal"}, {"enable_thinking": False, "reasoning_effort": "minimal"}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        (
            {"reasoning_effort": "xhigh", "chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            {"enable_thinking": False, "reasoning_effort": "xhigh", "a": 1},
        ),
    ],
)
async def test_how_hard_to_think_is_the_templates_to_know(more: dict[str, Any], expected: object) -> None:
    async with serving() as server:
        for path in PATHS:
            assert (await server.post(path, messages=QUESTION, **more)).status_code == 200
        assert [chat.template_kwargs for chat in server.engine.chats] == [expected, expected]


def test_thinking_hard_and_not_at_all(demo: httpx2.Client) -> None:
    def thought(effort: str) -> str:
        body = {"messages": QUESTION, "temperature": 0, "reasoning_effort": effort, "max_tokens": 200}
        return str(demo.post(PATHS[0], json=body).json()["choices"][0]["message"].get("reasoning_content", ""))

    assert thought("high") == thought("low") != ""
    assert thought("none") == thought("minimal") == ""


@pytest.mark.anyio
async def test_the_last_tokens_of_a_chat() -> None:
    chat = [{"role": "user", "content": "one two three four"}]
    async with serving() as server:
        for last in (3, 99, None):
            await server.post(PATHS[0], messages=chat, truncate_prompt_tokens=last)
        assert [len(one.prompt) for one in server.engine.submitted] == [3, 4, 4]
