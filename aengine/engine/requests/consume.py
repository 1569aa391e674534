"""Reads a request's stream: fragment by fragment, or collected into a `Completion`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from aengine.errors import EngineClosedError
from aengine.types import Choice, Completion, Fragment, PromptLogprob, TokenLogprob, ToolCallDelta, join_calls


class FragmentStream(Protocol):
    """A request of this process's engine, or of a server's, as a stream of fragments."""

    id: str

    async def take(self) -> list[Fragment]: ...

    def abort(self) -> None: ...


async def drain(submit: Callable[[], Awaitable[FragmentStream]]) -> AsyncGenerator[Fragment, None]:
    """Iterate a request to its end; aborts it when the consumer stops early."""
    stream = await submit()
    try:
        while fragments := await stream.take():
            for fragment in fragments:
                yield fragment
    finally:
        stream.abort()  # synchronous: nothing to await while a generator is being closed


async def collect(stream: FragmentStream) -> Completion:
    """Take a request to its end and put its fragments together."""
    texts: dict[int, list[str]] = {}
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    scores: dict[int, Sequence[PromptLogprob]] = {}
    thoughts: dict[int, list[str]] = {}
    calls: dict[int, list[ToolCallDelta]] = {}
    choices: list[Choice] = []
    usage = None
    try:
        while fragments := await stream.take():
            for fragment in fragments:
                index = fragment.index
                texts.setdefault(index, []).append(fragment.text)
                ids.setdefault(index, []).extend(fragment.token_ids)
                thoughts.setdefault(index, []).append(fragment.reasoning)
                calls.setdefault(index, []).extend(fragment.tool_calls)
                if fragment.logprobs is not None:
                    logprobs.setdefault(index, []).extend(fragment.logprobs)
                if fragment.prompt_logprobs is not None:
                    scores[index] = fragment.prompt_logprobs
                usage = fragment.usage or usage
                if fragment.finish_reason is not None:
                    choices.append(
                        Choice(
                            index=index,
                            text="".join(texts[index]),
                            token_ids=tuple(ids[index]),
                            finish_reason=fragment.finish_reason,
                            logprobs=tuple(logprobs[index]) if index in logprobs else None,
                            prompt_logprobs=scores.get(index),
                            stop_string=fragment.stop_string,
                            reasoning="".join(thoughts[index]),
                            tool_calls=join_calls(calls[index]),
                        )
                    )
    finally:
        stream.abort()
    if usage is None:
        raise EngineClosedError("the request ended without its last fragment")
    return Completion(id=stream.id, choices=tuple(sorted(choices, key=lambda choice: choice.index)), usage=usage)
