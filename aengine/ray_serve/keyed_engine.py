"""The engine of a replica. It records which prefixes it has cached, and measures its speed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextvars import ContextVar
from math import log2
from typing import Self

from aengine.engine import Engine
from aengine.engine.requests.live import LiveRequest
from aengine.engine.requests.request import Request
from aengine.ray_serve.routing.cached_keys import CachedKeys
from aengine.ray_serve.routing.load import Speed
from aengine.ray_serve.routing.prompt import Prompt
from aengine.requests.sampling_params import SamplingParams

_MEASURED_TOKENS = 512  # of the prompt
_MEASURED_STEPS = 16


class CallPrompt:
    """A call's prompt: the router's hashes of it, and later the token ids that the model reads."""

    __slots__ = ("prompt", "salt", "token_ids")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.token_ids: Sequence[int] | None = None
        self.salt: str | tuple[int, str | None] | None = None


CALL_PROMPT: ContextVar[CallPrompt | None] = ContextVar("call_prompt", default=None)


class KeyedEngine(Engine):
    """An engine that knows which keys of routers it has cached. `CALL_PROMPT` has the keys of the current call."""

    cached: CachedKeys

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.cached = CachedKeys(self.config.page_size)
        self.prefix_tree.watchers.append(self.cached)
        self._serving().requests.on_begin = _keep_tokens
        return self

    def note(self, call: CallPrompt) -> None:
        """Map a prompt's keys to its pages. Called with its first token, when the pages are in the tree."""
        if call.token_ids is not None and call.prompt.keys:
            pages = self.prefix_tree.match(call.token_ids, call.salt).pages
            self.cached.note(call.prompt, len(call.token_ids), pages)


def _keep_tokens(request: Request) -> None:
    """Store the token ids of the current call. Of several prompts in a call, the first is kept."""
    call = CALL_PROMPT.get()
    if call is not None and call.token_ids is None and isinstance(request, LiveRequest):
        sequence = request.sequences[0]
        call.token_ids, call.salt = sequence.prompt, sequence.salt


async def measure_speed(engine: Engine) -> Speed:
    """Measure the seconds for a prompt token and for a decode step of one request. Leaves the cache empty.

    The result is coarse on purpose. One of two equal replicas always measures a little faster, and would otherwise get
    all requests while the others are idle.
    """
    tokens = max(1, min(_MEASURED_TOKENS, engine.max_model_len // 2))
    prefill = min([await _seconds(engine, tokens, 1) for _ in range(3)])
    steps = max(1, min(_MEASURED_STEPS, engine.max_model_len // 4))
    decode = await _seconds(engine, 1, 1 + steps)
    engine.flush_cache()
    step = decode / (1 + steps)
    prompt_token = max(prefill - step, prefill / 10) / tokens
    return Speed(prefill=coarse(prompt_token), step=coarse(step), rows=engine.config.max_num_seqs)


def coarse(seconds: float) -> float:
    """Return the nearest power of the square root of two."""
    return float(2 ** (round(2 * log2(seconds)) / 2))


async def _seconds(engine: Engine, prompt: int, output: int) -> float:
    ids = [random.randrange(engine.vocab_size) for _ in range(prompt)]
    began = time.perf_counter()
    await engine.complete(ids, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
    return time.perf_counter() - began
