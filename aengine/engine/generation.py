"""`Engine`'s methods that continue a prompt or a chat: `generate`, `complete`, `chat_stream`, `chat`, and `submit`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from aengine.config import ServerConfig
from aengine.engine.loaded import Loaded
from aengine.engine.requests.arguments import check_routing, dict_list, one_chat, one_prompt, resolved_params
from aengine.engine.requests.consume import collect, drain
from aengine.engine.requests.gate import Gate
from aengine.engine.requests.stream import Stream
from aengine.errors import renamed_param
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import ChatPrompt
from aengine.text.grammar.grammars import Matcher
from aengine.text.reading.answer_reading import AnswerReading
from aengine.text.reading.read_stream import ReadStream
from aengine.text.reading.tools import rules_of
from aengine.text.tokens.bad_words import banned_sequences
from aengine.types import Completion, Fragment

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class Generation(ABC):
    """Checks, renders and tokenizes requests, and hands out the streams of their answers."""

    _gate: Gate

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def _serving(self) -> Loaded: ...

    @abstractmethod
    def _enqueue(
        self,
        token_ids: list[int],
        params: SamplingParams,
        grammar: Matcher | None,
        banned: tuple[tuple[int, ...], ...],
        request_id: str | None,
        priority: int,
        salt: str | None,
        adapter: str | None,
    ) -> Stream: ...

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Fragment, None]:
        """Stream the continuation of a prompt: text as the tokenizer reads it, or token ids.

        `options` are those of `submit`. Closing the generator (break, cancellation, timeout) aborts the
        request.
        """
        return drain(lambda: self.submit(prompt, params, **options))

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Like `generate`, collected into one `Completion`."""
        return await collect(await self.submit(prompt, params, **options))

    def chat_stream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Fragment, None]:
        """Stream the assistant's next message in a chat, rendered with the checkpoint's chat template.

        `options` are those of `submit_chat`.
        """
        return drain(lambda: self.submit_chat(messages, params, **options))

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Like `chat_stream`, collected into one `Completion`."""
        return await collect(await self.submit_chat(messages, params, **options))

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        clip: bool = False,
        **sampling: Any,
    ) -> Stream:
        """Validate, tokenize and enqueue. The consumer of the stream must `abort()` it when it stops early.

        `sampling` overrides single fields of the checkpoint's default `SamplingParams`; `params` replaces
        them. A lower `priority` goes first; requests with different `cache_salt` share no cached prefix. `adapter` is
        the name of a loaded one. `clip` cuts max_tokens to what the prompt leaves of the context; else it is refused.

        Raises `InvalidRequestError`, `ContextLengthError`, `QueueFullError`, `ModelNotFoundError`;
        `EngineNotReadyError`, `EngineClosedError` or `EngineFailedError` where the engine does not serve.
        """
        ready = self._serving()
        self._gate.check()
        params = resolved_params(ready.default_params, params, sampling, self.vocab_size)
        check_routing(priority, cache_salt, adapter)
        ready.adapter(adapter)
        banned = await banned_sequences(params.bad_words, ready.tokenizer, self.vocab_size)
        if isinstance(prompt, str):
            token_ids = await ready.tokenizer.encode(prompt, context=self.max_model_len)
        else:
            token_ids = one_prompt(prompt)
        if clip and params.max_tokens is not None:
            most = max(1, self.max_model_len - len(token_ids))
            params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, most))
        grammar = await ready.grammar(params)
        await self._gate.enter()
        return self._enqueue(token_ids, params, grammar, banned, request_id, priority, cache_salt, adapter)

    async def submit_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> ReadStream:
        """`submit` for a chat: `tools` and `template_kwargs` go to the chat template.

        Thoughts and calls of the tools come apart from the text, as `reasoning` and `tool_calls`.
        With `continue_final_message` the answer goes on with the last message, which is the beginning of it.
        """
        ready = self._serving()
        check_routing(priority, cache_salt, adapter)
        ready.adapter(adapter)
        offered = None if tools is None else dict_list(tools, "tools")
        prompt = await self.encode_chat(
            messages,
            tools=offered,
            template_kwargs=template_kwargs,
            continue_final_message=continue_final_message,
            context=self.max_model_len,
        )
        params = resolved_params(ready.default_params, params, sampling, self.vocab_size)
        form = ready.tokenizer.answer_format
        reading = AnswerReading(
            ServerConfig(),
            form,
            rules_of(offered or ()),
            may_think=form.may_think((template_kwargs or {}).get("enable_thinking")),
            structured=params.structured,
        )
        with renamed_param({"prompt": "messages"}):
            stream = await self.submit(
                prompt.token_ids,
                reading.engine_params(params, prompt.opens_thought),
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                adapter=adapter,
            )
        readers = [reading.reader(prompt.opens_thought, ready.tokenizer.token_bytes) for _ in range(params.n)]
        return ReadStream(stream, [reader.parser for reader in readers])

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        context: int | None = None,
    ) -> ChatPrompt:
        """A chat as the model reads it, rendered with the checkpoint's chat template.

        It ends with what opens the assistant's next message, or with neither, or with the last message's content.
        Raises `InvalidRequestError` where the messages do not suit the template, or have `context` tokens or more.
        """
        with renamed_param({"prompt": "messages"}):
            return await self._serving().tokenizer.encode_chat_prompt(
                one_chat(messages),
                None if tools is None else dict_list(tools, "tools"),
                None if template_kwargs is None else dict(template_kwargs),
                add_generation_prompt,
                continue_final_message,
                context,
            )
