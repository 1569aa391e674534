"""`/tokenize`, `/detokenize`, `/tokenizer_info`: text to ids, ids to text, the tokenizer's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import anyio.to_thread
import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.endpoint import json_response
from aengine.http.engine_like import EngineLike
from aengine.http.entry.body import FIELDS, decode
from aengine.http.entry.errors import HTTPError
from aengine.http.fields.image_sources import RequestImages
from aengine.http.fields.images import encode_chat
from aengine.http.fields.messages import (
    ChatMessage,
    ReasoningEffort,
    Tools,
    messages_for_template,
    refuse_chat_fields,
    template_options,
    tools_for_template,
)
from aengine.http.fields.sampling import TokenId
from aengine.http.fields.unknown import REFUSED, RequestBody, Unsupported
from aengine.http.operation import ALL_ERRORS, ENGINE_ERRORS, NAME_ERRORS, Operation
from aengine.http.state import ServerState
from aengine.requests.sampling_params import check_token_ids
from aengine.text.tokens.settings import TokenizerInfo

_INLINE_TOKENS = 2000  # up to this many tokens are converted in the event loop; a thread would cost more

_OF_A_PROMPT = (  # fields that change the prompt's tokens
    "functions",
    "reasoning",
    "thinking",
    "enable_thinking",
    "documents",
    "chat_template",
    "mm_processor_kwargs",
    "media_io_kwargs",
)


class TokenizeRequest(RequestBody, kw_only=True):
    """`POST /tokenize`. Exactly one of `prompt` and `messages`."""

    refused: ClassVar[Mapping[str, Unsupported]] = {
        **{name: REFUSED[name] for name in _OF_A_PROMPT},
        "truncate_prompt_tokens": Unsupported("all tokens are returned here; take the last ones"),
    }

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None  # the template gets it by this name, and as enable_thinking
    add_generation_prompt: bool | None = None  # None: true, unless the last message is continued
    continue_final_message: bool | None = None  # the answer continues the last message
    add_special_tokens: bool | None = None  # None: true for a prompt, false for messages
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None  # as the vocabulary writes them


class Detokenized(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class Tokens:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a prompt, or of a chat rendered by the chat template."""
        data = await self._state.bodies.read(request)
        engine = self._state.require_engine()
        body = decode(data, _tokenize_decoder)
        fields = decode(data, FIELDS)
        for name, refused in TokenizeRequest.refused.items():  # other fields do not change the prompt
            if name in fields:
                refused.check(name, fields[name])
        self._state.choose_model(body.model)  # adapters have the model's tokenizer
        ids = await self._encode(engine, body)

        def answer() -> Response:
            strings = [engine.tokenizer.token(token_id) or "" for token_id in ids] if body.return_token_strs else None
            return json_response(Tokenized(len(ids), engine.max_model_len, ids, strings))

        return await _run(answer, len(ids))

    async def _encode(self, engine: EngineLike, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("exactly one of prompt and messages must be given", "prompt")
        if body.messages is None:
            refuse_chat_fields(body)
            special = body.add_special_tokens is not False
            return await engine.tokenizer.encode(body.prompt or "", add_special_tokens=special)
        if body.add_special_tokens:
            raise InvalidRequestError("a chat template writes its special tokens itself", "add_special_tokens")
        messages, tools = messages_for_template(body.messages, engine), tools_for_template(body.tools)
        images = RequestImages(self._state.image_loader)
        prompt = await encode_chat(engine, images, messages, tools=tools, **template_options(body))
        return prompt.token_ids

    async def info(self, request: Request) -> Response:
        """Return the tokenizer's settings, if the knob tokenizer_info is on."""
        if not self._state.config.tokenizer_info:
            raise HTTPError(404, "not_found", "GET /tokenizer_info: the server's knob tokenizer_info is off")
        return json_response(self._state.require_engine().tokenizer.info)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids, including special tokens."""
        data = await self._state.bodies.read(request)
        engine = self._state.require_engine()
        body = decode(data, _detokenize_decoder)
        self._state.choose_model(body.model)

        def answer() -> Response:
            # The tokenizer may have more ids than the embedding.
            known = max(engine.vocab_size, engine.tokenizer.vocab_size)
            check_token_ids(body.tokens, known, "tokens")
            return json_response(Detokenized(engine.tokenizer.decode(body.tokens, False)))

        return await _run(answer, len(body.tokens))


async def _run(answer: Callable[[], Response], tokens: int) -> Response:
    return answer() if tokens <= _INLINE_TOKENS else await anyio.to_thread.run_sync(answer)


def operations(state: ServerState) -> list[Operation]:
    tokens = Tokens(state)
    return [
        Operation(
            "POST",
            "/tokenize",
            tokens.tokenize,
            "The token ids of a prompt or a chat.",
            body=TokenizeRequest,
            answer=Tokenized,
            refusals=ALL_ERRORS,
        ),
        Operation(
            "POST",
            "/detokenize",
            tokens.detokenize,
            "The text of token ids.",
            body=DetokenizeRequest,
            answer=Detokenized,
            refusals=ALL_ERRORS,
        ),
        Operation(
            "GET",
            "/tokenizer_info",
            tokens.info,
            "The tokenizer's settings.",
            answer=TokenizerInfo,
            refusals=(*NAME_ERRORS, *ENGINE_ERRORS),
        ),
    ]
