"""The engine of a replica: it knows which prefixes it has cached, and how fast it is."""

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

_PROMPT = 512  # tokens
_STEPS = 16


class Asked:
    """A call's prompt as the router hashed it, and, once it has been read, as the model does."""

    __slots__ = ("prompt", "salt", "token_ids")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.token_ids: Sequence[int] | None = None
        self.salt: str | tuple[int, str | None] | None = None


ASKED: ContextVar[Asked | None] = ContextVar("asked", default=None)  # of the call that is being answered


class KeyedEngine(Engine):
    """An engine whose calls say by `ASKED` what a router calls their prompt."""

    cached: CachedKeys

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.cached = CachedKeys(self.config.page_size)
        self.prefix_tree.watchers.append(self.cached)
        self._serving().requests.on_begin = _keep_tokens
        return self

    def note(self, asked: Asked) -> None:
        """Tie a prompt's keys to its pages; called when its first token is there, so that they are in the tree."""
        if asked.token_ids is not None and asked.prompt.keys:
            pages = self.prefix_tree.match(asked.token_ids, asked.salt).pages
            self.cached.note(asked.prompt, len(asked.token_ids), pages)


def _keep_tokens(request: Request) -> None:
    """Keep the token ids of the call that is being answered."""
    asked = ASKED.get()
    if (
        asked is not None and asked.token_ids is None and isinstance(request, LiveRequest)
    ):  # of several prompts the first
        sequence = request.sequences[0]
        asked.token_ids, asked.salt = sequence.prompt, sequence.salt


async def measure_speed(engine: Engine) -> Speed:
    """Seconds a prompt token and a decode step, of one request alone; leaves the cache empty.

    Coarsely: of two replicas of a kind one always measures a little faster, and idle ones would then all be passed over
    for that one, whose cache alone would fill.
    """
    tokens = max(1, min(_PROMPT, engine.max_model_len // 2))
    prefill = min([await _seconds(engine, tokens, 1) for _ in range(3)])
    steps = max(1, min(_STEPS, engine.max_model_len // 4))
    decode = await _seconds(engine, 1, 1 + steps)
    engine.flush_cache()
    step = decode / (1 + steps)
    prompt_token = max(prefill - step, prefill / 10) / tokens
    return Speed(prefill=coarse(prompt_token), step=coarse(step), rows=engine.config.max_num_seqs)


def coarse(seconds: float) -> float:
    """The nearest power of the square root of two."""
    return float(2 ** (round(2 * log2(seconds)) / 2))


async def _seconds(engine: Engine, prompt: int, output: int) -> float:
    ids = [random.randrange(engine.vocab_size) for _ in range(prompt)]
    began = time.perf_counter()
    await engine.complete(ids, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
    return time.perf_counter() - began
