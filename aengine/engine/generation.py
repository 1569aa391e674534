"""Accepts prompts and chats: checks, tokenizes and enqueues a request, and returns the stream of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from aengine.config import ServerConfig
from aengine.engine.loaded import Loaded
from aengine.engine.requests.arguments import Routing, dict_list, one_chat, one_prompt, resolved_params
from aengine.engine.requests.image_parts import no_images_error, take_images
from aengine.engine.requests.live import LiveRequest
from aengine.engine.requests.registry import Requests
from aengine.engine.requests.stream import Stream
from aengine.errors import InvalidRequestError, renamed_param
from aengine.prompt_images import PromptImages
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import ChatPrompt
from aengine.text.answer.reader import ReadStream
from aengine.text.reading import AnswerReading, call_rules
from aengine.text.template.messages import TemplateOptions
from aengine.text.tokens.bad_words import banned_sequences

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class Generation:
    """Implements the methods of `Engine` that generate text."""

    def __init__(self, loaded: Loaded, requests: Requests) -> None:
        self._loaded = loaded
        self._requests = requests

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
        routing: Routing,
        clip: bool = False,
        images: PromptImages | None = None,
    ) -> Stream:
        """Validate, tokenize and enqueue a prompt. All requests that generate pass this method.

        sampling: overrides single fields of the checkpoint's default parameters. Only allowed if `params` is None.
        clip, images: as in `Engine.submit`.
        """
        loaded, requests = self._loaded, self._requests
        requests.check()
        requests.gate.check()
        if images is not None and loaded.no_images:
            raise InvalidRequestError(f"images: the model takes none: {loaded.no_images}", "prompt")
        vocab_size = loaded.runtime.model.vocab_size
        params = resolved_params(loaded.default_params, params, sampling, vocab_size)
        routing.check()
        loaded.adapter(routing.adapter)
        tokenizer = loaded.tokenizer
        banned = await banned_sequences(params.bad_words, tokenizer, vocab_size)
        if isinstance(prompt, str):
            token_ids = await tokenizer.encode(prompt, context=loaded.max_model_len)
        else:
            token_ids = one_prompt(prompt)
        if clip:
            params = loaded.sequences.within_context(len(token_ids), params)
        grammar = await loaded.grammar(params)
        await requests.gate.enter()
        requests.check()  # the engine may have been closed meanwhile
        if images is not None and loaded.images is not None:  # keys of before a reload would not be valid
            images = loaded.images.with_keys(images)
        adapter = loaded.adapter(routing.adapter)
        request_id = requests.new_id(routing.request_id)
        sequence = loaded.sequences.for_generation(
            token_ids,
            params,
            constrained=grammar is not None,
            banned=banned,
            rank=requests.rank(routing.priority),
            salt=routing.cache_salt,
            adapter=adapter,
            images=images,
        )
        request = LiveRequest(
            request_id, sequence, grammar, tokenizer, requests.abort, requests.forget, loaded.latencies
        )
        loaded.scheduler.add(sequence)
        requests.begin(request)
        return request.stream

    async def submit_chat(
        self,
        messages: Messages,
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
        routing: Routing,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        continue_final_message: bool,
    ) -> ReadStream:
        """Render a chat and submit it. The stream separates thoughts and tool calls from the text."""
        loaded = self._loaded
        routing.check()
        loaded.adapter(routing.adapter)
        tools = None if tools is None else dict_list(tools, "tools")
        prompt = await self.encode_chat(
            messages,
            tools=tools,
            template_kwargs=template_kwargs,
            continue_final_message=continue_final_message,
            context=loaded.max_model_len,
        )
        params = resolved_params(loaded.default_params, params, sampling, loaded.runtime.model.vocab_size)
        form = loaded.tokenizer.answer_format
        reading = AnswerReading(
            ServerConfig(),
            form,
            call_rules(tools or ()),
            may_think=form.may_think((template_kwargs or {}).get("enable_thinking")),
            structured=params.structured,
        )
        with renamed_param({"prompt": "messages"}):
            engine_params = reading.engine_params(params, prompt.opens_thought)
            stream = await self.submit(prompt.token_ids, engine_params, {}, routing, images=prompt.images)
        bytes_of = loaded.tokenizer.token_bytes
        return ReadStream(stream, [reading.reader(prompt.opens_thought, bytes_of) for _ in range(params.n)])

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        context: int | None = None,
        **options: Unpack[TemplateOptions],
    ) -> ChatPrompt:
        """Render a chat with the checkpoint's template, and tokenize it."""
        offered = None if tools is None else dict_list(tools, "tools")
        chat = one_chat(messages)
        tokenizer, reading = self._loaded.tokenizer, self._loaded.images
        parts = take_images(chat)
        with renamed_param({"prompt": "messages"}):
            if not parts:
                return await tokenizer.encode_chat_prompt(chat, offered, context, **options)
            if reading is None:
                raise no_images_error(parts[0], self._loaded.no_images)
            sized = await reading.read_sizes(parts, context)
            prompt = await tokenizer.encode_chat_prompt(chat, offered, context, **options)
            token_ids, images = await reading.place(prompt.token_ids, sized, context)
            return prompt._replace(token_ids=token_ids, images=images)
