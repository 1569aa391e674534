"""Memory for the hidden states that a draft head reads."""

from __future__ import annotations

import torch

from aengine.model.decoder import Decoder
from aengine.model.drafting.base import Taps, TapStates


def tap_states(taps: Taps | None, tokens: int, decoder: Decoder) -> TapStates | None:
    """Return memory for the states of a step. None if there is no head, or if it reads the decoder's output."""
    if taps is None or not taps.layers:
        return None
    shape = (tokens, len(taps.layers) * decoder.config.hidden_size)
    return TapStates(taps.layers, torch.empty(shape, dtype=decoder.dtype, device=decoder.device))
