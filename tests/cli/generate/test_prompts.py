"""One line of a file of prompts, and its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from aengine.cli.generate.prompts import Result, _choice, answer_line
from aengine.errors import EngineClosedError, QueueFullError, ServerError
from aengine.types import Choice, Completion, Fragment, ToolCall, Usage

pytestmark = pytest.mark.anyio


class Model:
    """Records its calls, and raises the given failures first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked: list[dict[str, Any]] = []

    async def complete(self, prompt: Any, **options: Any) -> Completion:
        self.asked.append({"prompt": prompt, **options})
        if self.failures:
            raise self.failures.pop(0)
        n = options.get("n", 1)
        return Completion("id", tuple(Choice(i, f"text {i}", (7,), "stop") for i in range(n)), Usage(3, n, 2))

    async def chat(self, messages: Any, **options: Any) -> Completion:
        return await self.complete("chat", messages=messages, **options)

    def chat_stream(self, messages: Any, **options: Any) -> AsyncGenerator[Fragment, None]:
        raise NotImplementedError


async def one(model: Model, line: str, **defaults: Any) -> Result:
    return await answer_line(model, defaults, 1, line.encode(), plain=False, ids=False)


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ('"hi"', {"prompt": "hi"}),
        ("[1, 2]", {"prompt": [1, 2]}),
        ('{"prompt": "hi", "max_tokens": 3}', {"prompt": "hi", "max_tokens": 3}),
        (
            '{"messages": [{"role": "user"}], "tools": []}',
            {"prompt": "chat", "messages": [{"role": "user"}], "tools": []},
        ),
    ],
)
async def test_the_forms_of_a_line(line: str, asked: dict[str, Any]) -> None:
    model = Model()
    result = await one(model, line)
    assert model.asked == [asked]
    assert not result.failed
    assert result.body["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 2, "total_tokens": 4}


async def test_a_lines_own_fields_win_over_the_flags() -> None:
    model = Model()
    await one(model, '{"prompt": "hi", "temperature": 0}', temperature=1, top_k=5)
    assert model.asked == [{"prompt": "hi", "temperature": 0, "top_k": 5}]


async def test_plain_text_is_the_prompt_itself() -> None:
    model = Model()
    result = await answer_line(model, {}, 1, b'"hi', plain=True, ids=True)
    assert model.asked == [{"prompt": '"hi'}]
    assert result.body["token_ids"] == (7,)


async def test_thoughts_and_calls_stand_apart_from_the_text() -> None:
    call = ToolCall("call_1", "add", '{"a": 1}')
    written = _choice(Choice(0, "", (7,), "stop", reasoning="I add.", tool_calls=(call,)), ids=False)
    assert msgspec.json.decode(msgspec.json.encode(written)) == {
        "text": "",
        "finish_reason": "stop",
        "reasoning": "I add.",
        "tool_calls": [{"id": "call_1", "name": "add", "arguments": '{"a": 1}'}],
    }


async def test_several_choices_and_an_id_that_is_passed_through() -> None:
    result = await one(Model(), '{"prompt": "hi", "n": 2, "id": [1]}')
    assert result.body["id"] == [1]
    assert [choice["text"] for choice in result.body["choices"]] == ["text 0", "text 1"]
    assert result.body["text"] == "text 0"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "JSON"),
        ("\udcff", "JSON"),
        ("3", "prompt"),
        ("{}", "prompt or messages"),
        ('{"prompt": "a", "messages": []}', "prompt or messages"),
        ('{"prompt": "a", "max_token": 3}', "unknown field 'max_token' (did you mean max_tokens?)"),
        ('{"prompt": "a", "self": 3}', "unknown field 'self'"),
        ('{"prompt": "a", "tools": []}', "unknown field 'tools'"),
        ("[" * 100_000, "JSON"),
    ],
)
async def test_a_bad_line_is_reported_with_its_number(line: str, told: str) -> None:
    result = await answer_line(Model(), {}, 7, line.encode(errors="surrogateescape"), plain=False, ids=False)
    assert result.failed
    assert result.body["line"] == 7
    assert told in result.body["error"]["message"]


async def test_a_full_queue_is_waited_for() -> None:
    model = Model(QueueFullError("full", retry_after=0.001), QueueFullError("full", retry_after=0.001))
    assert not (await one(model, '"hi"')).failed
    assert len(model.asked) == 3


async def test_an_error_of_one_line_is_its_result() -> None:
    assert (await one(Model(ServerError("too large", 413)), '"hi"')).failed


@pytest.mark.parametrize("error", [EngineClosedError("closed"), ServerError("cannot be reached")])
async def test_an_error_of_all_lines_ends_the_run(error: Exception) -> None:
    with pytest.raises(type(error)):
        await one(Model(error), '"hi"')
