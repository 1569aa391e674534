"""How many snapshots of recurrent states there are, and how often they are taken."""

from __future__ import annotations

import math

import torch

from aengine.cache.snapshots import SnapshotRoom
from aengine.cache.states import StateRoom
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.delta.base import BLOCK
from aengine.model.config import ModelConfig
from aengine.runtime.device import DTYPES

SHARE = 0.5  # of the memory behind the rows' states that snapshots have, where no knob says how many there are
MOST_SNAPSHOTS = 2**16


def room_for_states(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, page_bytes: int, available: int
) -> StateRoom | None:
    """What a model of that dtype needs; None: no layer has a state. available: bytes for pages and snapshots.

    Raises `ConfigError` where snapshots cannot be taken at borders of pages.
    """
    shape = model.state_shape(DTYPES[config.state_dtype], dtype)
    if shape is None:
        return None
    least = math.lcm(BLOCK, config.page_size)
    asked = config.state_snapshot_tokens
    if asked is not None and asked % least:
        raise ConfigError(
            f"state_snapshot_tokens: {asked} is no multiple of {least}, which states can be kept behind (of "
            f"{BLOCK} tokens and of page_size, {config.page_size})"
        )
    grain = asked or least
    # Of a prompt, so many tokens that a snapshot takes no more memory than their keys and values.
    each = shape.slot_bytes * config.page_size / page_bytes
    prompt_grain = asked or max(1, math.ceil(each / least)) * least
    fitting = min(int(available * SHARE) // shape.slot_bytes, MOST_SNAPSHOTS)
    wanted = fitting if config.state_snapshots is None else config.state_snapshots
    count = wanted if config.prefix_cache else 0
    return StateRoom(shape, config.max_num_seqs, SnapshotRoom(count, grain, prompt_grain))


def states_of_rows(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> StateRoom | None:
    """The same without snapshots."""
    shape = model.state_shape(DTYPES[config.state_dtype], dtype)
    return None if shape is None else StateRoom(shape, config.max_num_seqs, SnapshotRoom())
