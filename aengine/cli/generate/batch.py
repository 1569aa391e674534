"""Runs many prompts through one model: a bounded number at once, results in the order of the prompts, in bounded
memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import anyio
import msgspec

from aengine.errors import (
    AengineError,
    EngineClosedError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    ServerError,
)
from aengine.requests.sampling_params import SamplingParams
from aengine.types import Choice, Completion

_WINDOW = 4  # results that may wait for a slow one before them, per prompt that runs


class Model(Protocol):
    """What answers a line: `aengine.Engine` or `aengine.Client`."""

    async def complete(self, prompt: Any, **options: Any) -> Completion: ...

    async def chat(self, messages: Any, **options: Any) -> Completion: ...


class Result(msgspec.Struct):
    """One line of output."""

    body: dict[str, Any]
    failed: bool = False
    tokens: int = 0


class _Job:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.result = Result({})


async def run_batch(
    lines: AsyncIterator[bytes],
    answer: Callable[[int, bytes], Awaitable[Result]],
    write: Callable[[Result], Awaitable[None]],
    concurrency: int,
) -> None:
    """Write `answer(number, line)` for every line that is not blank, in their order; numbers count from 1.

    What `answer`, `write` or the lines raise ends it all, and comes alone (not in a group).
    """
    room = anyio.Semaphore(concurrency)
    put, take = anyio.create_memory_object_stream[_Job](_WINDOW * concurrency)

    async def work(job: _Job, number: int, line: bytes) -> None:
        try:
            job.result = await answer(number, line)
        finally:
            room.release()
        job.done.set()

    async def read() -> None:
        with put:
            number = 0
            async for line in lines:
                number += 1
                if line.strip():
                    job = _Job()
                    await put.send(job)  # waits while too many results wait
                    await room.acquire()
                    tasks.start_soon(work, job, number, line)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            with take:
                async for job in take:
                    await job.done.wait()
                    await write(job.result)
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def answer_line(
    model: Model, defaults: dict[str, Any], line: int, text: bytes, *, plain: bool, ids: bool
) -> Result:
    """The result of one prompt. What is wrong with this line alone is its result; what ends the run is raised."""
    head: dict[str, Any] = {"line": line}
    try:
        fields = _fields(text, plain)
        if "id" in fields:
            head["id"] = fields.pop("id")
        completion = await _retry_while_full(model, defaults | fields)
    except (EngineClosedError, EngineNotReadyError):
        raise
    except AengineError as error:
        if isinstance(error, ServerError) and error.status is None:
            raise  # there is nobody to ask any more
        failure = {"message": str(error), "param": getattr(error, "param", None)}
        return Result({**head, "error": failure}, failed=True)
    usage = completion.usage
    first, *others = (_choice(choice, ids) for choice in completion.choices)
    body = {**head, **first} | ({"choices": [first, *others]} if others else {})
    body["usage"] = {**msgspec.to_builtins(usage), "total_tokens": usage.total_tokens}
    return Result(body, tokens=usage.completion_tokens)


def _fields(text: bytes, plain: bool) -> dict[str, Any]:
    """A line's fields as arguments of `complete` or `chat`. Raises `InvalidRequestError`."""
    try:
        value = text.decode() if plain else msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if plain:
            raise InvalidRequestError(f"the line is not UTF-8: {error}") from None
        raise InvalidRequestError(
            f"the line is not valid JSON ({error}); with --text every line is a prompt as it stands"
        ) from None
    if isinstance(value, (str, list)):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InvalidRequestError(
            "the line must be a prompt, an object with either prompt or messages, or a request of a batch file, with "
            "custom_id, method, url and body"
        )
    known = _CHAT_FIELDS if "messages" in value else _PROMPT_FIELDS
    for name in value:
        if name not in known:
            raise InvalidRequestError(f"unknown field {name!r}; known are {', '.join(known)}", name)
    return value


_COMMON_FIELDS = (*SamplingParams.__struct_fields__, "priority", "cache_salt", "adapter", "id")
_PROMPT_FIELDS = ("prompt", *_COMMON_FIELDS)
_CHAT_FIELDS = ("messages", "tools", "template_kwargs", "continue_final_message", *_COMMON_FIELDS)


async def _retry_while_full(model: Model, fields: dict[str, Any]) -> Completion:
    """Complete a prompt; where the queue is full, wait and try again: other clients' work is not this line's fault."""
    while True:
        try:
            if "messages" in fields:
                return await model.chat(**fields)
            return await model.complete(**fields)
        except QueueFullError as error:
            await anyio.sleep(error.retry_after)


def _choice(choice: Choice, ids: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"text": choice.text, "finish_reason": choice.finish_reason}
    if ids:
        body["token_ids"] = choice.token_ids
    if choice.logprobs is not None:
        body["logprobs"] = choice.logprobs
    if choice.reasoning:
        body["reasoning"] = choice.reasoning
    if choice.tool_calls:
        body["tool_calls"] = choice.tool_calls
    return body
