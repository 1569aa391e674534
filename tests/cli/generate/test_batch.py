"""Many prompts: in order, so many at once, and never more in memory than a few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest

from aengine.cli.generate.batch import Result, _choice, answer_line, run_batch
from aengine.errors import EngineClosedError, QueueFullError, ServerError
from aengine.types import Choice, Completion, ToolCall, Usage

pytestmark = pytest.mark.anyio


async def numbered(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield str(number).encode()


async def test_results_come_in_order_however_long_each_takes() -> None:
    written: list[Any] = []

    async def answer(number: int, line: bytes) -> Result:
        for _ in range(number * 7 % 11):
            await asyncio.sleep(0)
        return Result({"line": number, "text": line.decode()})

    async def write(result: Result) -> None:
        written.append(result.body)

    await run_batch(numbered(100), answer, write, concurrency=8)
    assert written == [{"line": number, "text": str(number - 1)} for number in range(1, 101)]


async def test_one_slow_prompt_holds_up_the_reading_and_nothing_piles_up() -> None:
    read = running = most = 0
    slow = anyio.Event()

    async def lines() -> AsyncIterator[bytes]:
        nonlocal read
        async for line in numbered(2_000):
            read += 1
            yield line

    async def answer(number: int, line: bytes) -> Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10):
            await (slow.wait() if number == 1 else asyncio.sleep(0))
        running -= 1
        return Result({})

    async def write(result: Result) -> None:
        pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_batch, lines(), answer, write, 4)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert read < 30
        slow.set()
    assert read == 2_000
    assert most == 4


async def test_blank_lines_count_and_give_nothing() -> None:
    async def lines() -> AsyncIterator[bytes]:
        for line in (b"a", b"", b"  ", b"b"):
            yield line

    written: list[Any] = []

    async def answer(number: int, line: bytes) -> Result:
        return Result({"line": number})

    async def write(result: Result) -> None:
        written.append(result.body["line"])

    await run_batch(lines(), answer, write, 2)
    assert written == [1, 4]


@pytest.mark.parametrize("where", ["answer", "write", "lines"])
async def test_what_is_raised_comes_alone_and_ends_it_all(where: str) -> None:
    answered = 0

    async def lines() -> AsyncIterator[bytes]:
        async for line in numbered(10_000):
            yield line
        if where == "lines":
            raise BrokenPipeError

    async def answer(number: int, line: bytes) -> Result:
        nonlocal answered
        answered += 1
        await asyncio.sleep(0)
        if where == "answer" and number == 5:
            raise BrokenPipeError
        return Result({})

    async def write(result: Result) -> None:
        if where == "write":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await run_batch(lines(), answer, write, 3)
    assert answered < 10_000 or where == "lines"


class Model:
    """Notes what it is asked, and fails as often as it is told to."""

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
        ('{"prompt": "a", "max_token": 3}', "unknown field 'max_token'"),
        ('{"prompt": "a", "self": 3}', "unknown field 'self'"),
        ('{"prompt": "a", "tools": []}', "unknown field 'tools'"),
        ("[" * 100_000, "JSON"),
    ],
)
async def test_a_bad_line_is_told_with_its_number(line: str, told: str) -> None:
    result = await answer_line(Model(), {}, 7, line.encode(errors="surrogateescape"), plain=False, ids=False)
    assert result.failed
    assert result.body["line"] == 7
    assert told in result.body["error"]["message"]


async def test_a_full_queue_is_waited_for() -> None:
    model = Model(QueueFullError("full", retry_after=0.001), QueueFullError("full", retry_after=0.001))
    assert not (await one(model, '"hi"')).failed
    assert len(model.asked) == 3


async def test_what_befalls_one_line_is_its_own() -> None:
    assert (await one(Model(ServerError("too large", 413)), '"hi"')).failed


@pytest.mark.parametrize("error", [EngineClosedError("closed"), ServerError("cannot be reached")])
async def test_what_befalls_all_lines_ends_the_run(error: Exception) -> None:
    with pytest.raises(type(error)):
        await one(Model(error), '"hi"')
