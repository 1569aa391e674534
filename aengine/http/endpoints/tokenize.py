"""`/tokenize`, `/detokenize`, `/tokenizer_info`: text to ids, ids to text, the tokenizer's settings."""

from __future__ import annotations

from collections.abc import Callable

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.bodies.chat import messages_for_template, tools_for_template
from aengine.http.bodies.requests import DetokenizeRequest, TokenizeRequest, refuse_chat_fields, template_options
from aengine.http.bodies.responses import Detokenized, Tokenized
from aengine.http.door.body import decode
from aengine.http.door.errors import HTTPError
from aengine.http.endpoints.base import json_response
from aengine.http.engine_like import EngineLike
from aengine.http.state import ServerState
from aengine.requests.sampling_params import check_token_ids

_INLINE_TOKENS = 2000  # worded within the loop; a thread costs more than that

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class Tokens:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def tokenize(self, request: Request) -> Response:
        """The ids of a prompt, or of a chat as the chat template renders it."""
        data = await self._state.bodies.read(request)
        engine = self._state.require_engine()
        body = decode(data, _tokenize_decoder)
        self._state.unknown_fields.check_tokenized(data)
        self._state.choose_model(body.model)  # adapters read as their model does
        ids = await _encode(engine, body)

        def answer() -> Response:
            strings = [engine.tokenizer.token(token_id) or "" for token_id in ids] if body.return_token_strs else None
            return json_response(Tokenized(len(ids), engine.max_model_len, ids, strings))

        return await _run(answer, len(ids))

    async def info(self, request: Request) -> Response:
        """The tokenizer's settings, where the server's knob gives them."""
        if not self._state.config.tokenizer_info:
            raise HTTPError(404, "not_found", "GET /tokenizer_info: the server's knob tokenizer_info is off")
        return json_response(self._state.require_engine().tokenizer.info)

    async def detokenize(self, request: Request) -> Response:
        """The text of ids, special tokens written out."""
        data = await self._state.bodies.read(request)
        engine = self._state.require_engine()
        body = decode(data, _detokenize_decoder)
        self._state.choose_model(body.model)

        def answer() -> Response:
            check_token_ids(body.tokens, engine.vocab_size, "tokens")
            return json_response(Detokenized(engine.tokenizer.decode(body.tokens, False)))

        return await _run(answer, len(body.tokens))


async def _encode(engine: EngineLike, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("exactly one of prompt and messages must be given", "prompt")
    if body.messages is None:
        refuse_chat_fields(body)
        special = body.add_special_tokens is not False
        return await engine.tokenizer.encode(body.prompt or "", add_special_tokens=special)
    if body.add_special_tokens:
        raise InvalidRequestError("a chat template writes its special tokens itself", "add_special_tokens")
    return await engine.tokenizer.encode_chat(
        messages_for_template(body.messages), tools_for_template(body.tools), **template_options(body)
    )


async def _run(answer: Callable[[], Response], tokens: int) -> Response:
    return answer() if tokens <= _INLINE_TOKENS else await anyio.to_thread.run_sync(answer)
