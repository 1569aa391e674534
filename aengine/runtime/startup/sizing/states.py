"""Chooses the number of snapshots of recurrent states, and the distance between them in tokens."""

from __future__ import annotations

import math

import torch

from aengine.cache.snapshots import SnapshotRoom
from aengine.cache.states import StateRoom
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.recurrent.state import BLOCK
from aengine.model.config import ModelConfig
from aengine.runtime.device import DTYPES

SHARE = 0.5  # share of the memory left after the rows' states that snapshots use, unless a knob sets their number
MOST_SNAPSHOTS = 2**16


def room_for_states(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, page_bytes: int, available: int, most_drafts: int
) -> StateRoom | None:
    """Return the sizes of a model's states and snapshots, or None if no layer has a state.

    Args:
        available: Bytes for pages and snapshots.
        most_drafts: The most drafts of a row in a step.

    Raises: ConfigError if snapshots would not be at page boundaries.
    """
    shape = model.state_shape(DTYPES[config.state_dtype], dtype)
    if shape is None:
        return None
    least = math.lcm(BLOCK, config.page_size)
    asked = config.state_snapshot_tokens
    if asked is not None and asked % least:
        raise ConfigError(
            f"state_snapshot_tokens: {asked} must be a multiple of {least}, the common multiple of {BLOCK} tokens and "
            f"page_size ({config.page_size})"
        )
    grain = asked or least
    # In a prompt, a snapshot takes no more memory than the keys and values of the tokens up to the next snapshot.
    each = shape.slot_bytes * config.page_size / page_bytes
    prompt_grain = asked or max(1, math.ceil(each / least)) * least
    fitting = min(int(available * SHARE) // shape.slot_bytes, MOST_SNAPSHOTS)
    wanted = fitting if config.state_snapshots is None else config.state_snapshots
    count = wanted if config.prefix_cache else 0
    return StateRoom(shape, config.max_num_seqs, SnapshotRoom(count, grain, prompt_grain), most_drafts)


def states_of_rows(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, most_drafts: int = 0
) -> StateRoom | None:
    """Like `room_for_states`, without snapshots."""
    shape = model.state_shape(DTYPES[config.state_dtype], dtype)
    return None if shape is None else StateRoom(shape, config.max_num_seqs, SnapshotRoom(), most_drafts)
