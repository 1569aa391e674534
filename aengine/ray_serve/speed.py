"""Measures how fast an engine is, once, when it is ready: routers weigh cached tokens against work ahead by it."""

from __future__ import annotations

import random
import time
from math import log2

from aengine.engine import Engine
from aengine.ray_serve.routing.load import Speed
from aengine.requests.sampling_params import SamplingParams

_PROMPT = 512  # tokens
_STEPS = 16


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
