"""What a process beside a start-up compiles."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.config import EngineConfig
from aengine.kernels.launch import Launch
from aengine.model.config import ModelConfig


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one process in the kernels of a start-up on a device."""

    config: EngineConfig
    model: ModelConfig
    dtype: str
    capability: tuple[int, int]
    launch: Launch
    room: int  # bytes that the KV pool will have, roughly
    what: Literal["triton", "flash-attn-4"] = "triton"
    index: int = 0  # of `count` processes that share the work
    count: int = 1
    threads: int = 1
