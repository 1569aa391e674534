"""Requests to repeat words, so that the model learns to copy any words."""

from __future__ import annotations

from random import Random

from bench.demo_model import pools
from bench.demo_model.pools import HELD_OUT, TRAINED

_REPEAT = (
    "Repeat after me: {}",
    "Repeat: {}",
    'Repeat "{}".',
    'Say "{}".',
    'Please say "{}".',
    "Echo: {}",
    "Write exactly this: {}",
    "Copy this text: {}",
)
_QUOTE = ("Put {} in quotes.", "Write {} in quotes.", "Quote: {}")


def request(rng: Random, *, held_out: bool) -> tuple[str, str]:
    """A text to repeat, with or without quotes around it. Held-out texts are made of held-out values."""
    pool = HELD_OUT if held_out else TRAINED
    makers = (pools.word, pools.word, pools.name, pools.city)
    text = " ".join(rng.choice(makers)(rng, pool) for _ in range(rng.choice((1, 1, 2, 3, 4, 5))))
    if rng.random() < 0.35:
        return rng.choice(_QUOTE).format(text), f'"{text}"'
    return rng.choice(_REPEAT).format(text), text
