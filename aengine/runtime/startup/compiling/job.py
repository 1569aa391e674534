"""The job of a process that compiles kernels."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.config import EngineConfig
from aengine.kernels.launch import Launch
from aengine.model.config import ModelConfig


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process's share of the kernels of a start-up."""

    config: EngineConfig
    model: ModelConfig
    dtype: str
    capability: tuple[int, int]
    launch: Launch
    room: int  # approximate bytes of the KV pool
    what: Literal["triton", "flash-attn-4"] = "triton"
    index: int = 0
    count: int = 1  # of processes
    threads: int = 1
