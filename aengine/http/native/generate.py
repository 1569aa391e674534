"""`POST /generate`: aengine's own endpoint, which returns text and token ids."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError, renamed_param
from aengine.http.endpoint import Endpoint, RenderedChat
from aengine.http.engine_like import EngineLike
from aengine.http.fields.messages import (
    ChatMessage,
    ReasoningEffort,
    Tools,
    messages_for_template,
    refuse_chat_fields,
    template_options,
)
from aengine.http.fields.prompts import Prompt
from aengine.http.fields.sampling import LastTokens, Logprobs, MultiChoiceRequest, TokenId
from aengine.http.fields.tools import choose_tools
from aengine.http.fields.unknown import REFUSED_WITH_PROMPTS, Unsupported
from aengine.http.openai.bodies import PromptLogprobs, UsageBody
from aengine.http.openai.logprobs import usage_body
from aengine.http.operation import ALL_ERRORS, Operation
from aengine.http.state import ServerState
from aengine.http.streams import sse
from aengine.http.streams.document import DocumentResponse, document, encoded_list
from aengine.http.streams.prompt_logprobs import PromptLogprobsOf, no_prompt_logprobs, with_prompt_logprobs
from aengine.http.streams.sse import EventEncoder, EventStreamResponse
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.reader import ReadStream
from aengine.types import Choice, Completion, FinishReason, Fragment, TokenLogprob, ToolCall, Usage

DEFAULT_MAX_TOKENS = 128

_CALLS_ARE_FREE = Unsupported(
    "calls are neither forced nor restricted here; send it to /v1/chat/completions", ("auto", True)
)


class GenerateRequest(MultiChoiceRequest, kw_only=True):
    """`POST /generate`. Exactly one of `prompt`, `input_ids` and `messages`."""

    refused: ClassVar[Mapping[str, Unsupported]] = {
        **REFUSED_WITH_PROMPTS,
        "tool_choice": _CALLS_ARE_FREE,
        "parallel_tool_calls": _CALLS_ARE_FREE,
        "return_token_ids": Unsupported("they are always in the answer here", (True, False)),
    }

    prompt: str | list[TokenId] | None = None
    input_ids: list[TokenId] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Tools | None = None  # for the chat template
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None  # the template gets it by this name, and as enable_thinking
    add_generation_prompt: bool | None = None  # None: true, unless the last message is continued
    continue_final_message: bool | None = None  # the answer continues the last message
    fill_context: bool | None = None  # without max_tokens: generate until the context is full
    logprobs: Logprobs | None = None
    truncate_prompt_tokens: LastTokens | None = None
    stream: bool | None = None  # None: true


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | msgspec.UnsetType = msgspec.UNSET  # the stop string that ended it
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # of a chat that thinks
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET  # of a chat with tools
    logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate` that does not stream."""

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | msgspec.UnsetType = msgspec.UNSET  # the stop string that ended it
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # of a chat that thinks
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET  # of a chat with tools
    logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET
    choices: list[GeneratedChoice] | msgspec.UnsetType = msgspec.UNSET  # if n > 1
    prompt_logprobs: PromptLogprobs = msgspec.UNSET
    usage: UsageBody


_decoder = msgspec.json.Decoder(GenerateRequest)


class Generate(Endpoint):
    async def create(self, request: Request) -> Response:
        parsed = await self._read_request(request, _decoder)
        engine, body = parsed.engine, parsed.body
        max_tokens = None if body.fill_context else DEFAULT_MAX_TOKENS
        params = body.params(engine.default_params, max_tokens=max_tokens, logprobs=body.logprobs)
        streamed = body.stream is None or body.stream
        budget = self._candidate_budget(engine, params, copies=params.n if streamed else 1, streamed=streamed)
        name = "input_ids" if body.input_ids is not None else "prompt" if body.messages is None else "messages"
        prompt = await self._prompt(engine, body, params)
        with renamed_param({"prompt": name}):
            stream, _, readers = await self._submit(
                parsed,
                prompt,
                params,
                f"gen-{uuid.uuid4().hex}",
                budget=budget,
                last_tokens=body.truncate_prompt_tokens,
                clip=body.max_tokens is None,  # the default is reduced to fit; a max_tokens of the request is refused
            )
        if readers:
            stream = ReadStream(stream, readers)
        stream, prompt_logprobs_of = with_prompt_logprobs(stream, engine.tokenizer, body.prompt_logprobs)
        if streamed:
            return EventStreamResponse(stream, GenerateEventEncoder(params.n, prompt_logprobs_of), self._state.config)
        return DocumentResponse(stream, lambda completion: completion_body(completion, prompt_logprobs_of))

    async def _prompt(self, engine: EngineLike, body: GenerateRequest, params: SamplingParams) -> Prompt | RenderedChat:
        """Return the prompt as text or ids, or a rendered chat.

        Raises `InvalidRequestError` unless the request has exactly one of them.
        """
        if [body.prompt, body.input_ids, body.messages].count(None) != 2:
            raise InvalidRequestError("exactly one of prompt, input_ids and messages must be given", "prompt")
        if body.messages is None:
            refuse_chat_fields(body)
            return body.prompt if body.prompt is not None else body.input_ids or []
        tools = choose_tools(body.tools or [], None, parallel=True)
        context = engine.max_model_len if body.truncate_prompt_tokens is None else None
        messages = messages_for_template(body.messages, engine)
        return await self._render(engine, messages, tools, params, template_options(body), context)


class GenerateEventEncoder(EventEncoder):
    """Encodes fragments as `{"text", "token_ids", "finish_reason"}`, with `index` if n > 1.

    The last event has `usage`. A choice's last event has `stop_string` if one ended it.
    """

    def __init__(self, n: int, prompt_logprobs_of: PromptLogprobsOf = no_prompt_logprobs) -> None:
        self._n = n
        self._prompt_logprobs_of = prompt_logprobs_of
        self._templates: dict[int, bytes] = {}  # event templates by choice

    def event(self, fragment: Fragment) -> bytes:
        plain = not fragment.reasoning and not fragment.tool_calls and fragment.finish_reason is None
        if plain and fragment.logprobs is None and fragment.prompt_logprobs is None:
            return self._template(fragment.index) % (sse.encode(fragment.text), sse.encode(fragment.token_ids))
        payload = self._payload(fragment.index, fragment.text, fragment.token_ids, fragment.finish_reason)
        payload |= _optional_fields(fragment)
        if fragment.logprobs is not None:
            payload["logprobs"] = fragment.logprobs
        if fragment.prompt_logprobs is not None:
            payload |= self._prompt_logprobs_of(fragment.index)
        if fragment.usage is not None:
            payload["usage"] = usage_body(fragment.usage)
        return b"data: %b\n\n" % b"".join(document(payload))

    def _template(self, index: int) -> bytes:
        if (template := self._templates.get(index)) is None:
            template = sse.template(self._payload(index, sse.PLACEHOLDER, sse.PLACEHOLDER, None))
            self._templates[index] = template
        return template

    def _payload(
        self, index: int, text: str, token_ids: Sequence[int] | str, finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        payload = {"text": text, "token_ids": token_ids, "finish_reason": finish_reason}
        return {"index": index, **payload} if self._n > 1 else payload

    def closing(self, usage: Usage | None) -> bytes:
        return sse.DONE


async def completion_body(completion: Completion, prompt_logprobs_of: PromptLogprobsOf) -> object:
    """Return the body of an answer: the first choice at the top level, and all choices under `choices` if n > 1."""
    first, *others = completion.choices
    payload: dict[str, Any] = {"id": completion.id, **await _choice_body(first)}
    if others:
        payload["choices"] = [{"index": one.index, **await _choice_body(one)} for one in completion.choices]
    payload |= prompt_logprobs_of(0)
    payload["usage"] = usage_body(completion.usage)
    return payload


async def _choice_body(choice: Choice) -> dict[str, Any]:
    body: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
    }
    body |= _optional_fields(choice)
    if choice.logprobs is not None:
        body["logprobs"] = await encoded_list(choice.logprobs, lambda one: one)
    return body


def _optional_fields(piece: Fragment | Choice) -> dict[str, Any]:
    names = ("stop_string", "reasoning", "tool_calls")
    return {name: value for name in names if (value := getattr(piece, name))}


def operations(state: ServerState) -> list[Operation]:
    generate = Generate(state).create
    return [
        Operation(
            "POST", path, generate, summary, body=GenerateRequest, answer=Generated, streams=True, refusals=ALL_ERRORS
        )
        for path, summary in (
            ("/generate", "Continue a prompt; streams by default."),
            ("/v1/generate", "The same as /generate."),
        )
    ]
